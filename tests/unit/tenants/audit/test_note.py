"""Notes, checkpoints and proofs as text: the C2SP examples, changed ones, and what is no note."""

from __future__ import annotations

import base64

import pytest

from tenants.audit.note import (
    Checkpoint,
    InclusionProof,
    PublicKey,
    SigningKey,
    open_checkpoint,
    open_note,
    parse_checkpoint,
    parse_proof,
)
from tenants.audit.tree import frontier_of, inclusion_proof, leaf_hash, subtree_of_leaves
from tenants.errors import Invalid

#: From the documentation of Go's package `note`, which the C2SP document describes.
GO_KEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
GO_NOTE = (
    "This is an example message.\n\n"
    "— example.com/foo Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72"
    "IneyaQM=\n"
)
#: From the C2SP documents signed-note and tlog-checkpoint, which show no keys.
POEM = (
    "Ognuno sta solo sul cuor della terra\ntrafitto da un raggio di sole:\n\ned è subito sera.\n\n"
    "— quasimodo.example/salvatore NnugSzTjtVAewIS+Z/iJhUPeFDkO/5QQ2i5ddnGITLlC+EhfLW9oJKONrMouFSQU0xMcXxj99i"
    "hAQwaqP3ZekRwNtIc=\n"
)
SOFA = (
    "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
    "— example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nT"
    "o+zyWE+xeMcTOAYQ8=\n"
)
KEY = SigningKey("example.org/log", bytes(range(32)))
OTHER = SigningKey("example.org/log", bytes(range(1, 33)))


def test_the_example_of_the_document_opens_and_a_changed_one_does_not() -> None:
    key = PublicKey.parse(GO_KEY)
    assert str(key) == GO_KEY
    assert open_note(GO_NOTE, [key]) == "This is an example message.\n"
    with pytest.raises(Invalid, match="is not right"):
        open_note(GO_NOTE.replace("an example", "no example"), [key])
    with pytest.raises(Invalid, match=r"no known key has signed it; signed by: example.com/foo\+530d903a"):
        open_note(GO_NOTE, [KEY.public])


def test_the_documents_other_examples_are_read_up_to_their_keys() -> None:
    key = PublicKey("quasimodo.example/salvatore", bytes(32))
    with pytest.raises(Invalid, match=r"signed by: quasimodo.example/salvatore\+367ba04b"):
        open_note(POEM, [key])
    sofa = parse_checkpoint(SOFA.partition("\n\n")[0] + "\n")
    assert (sofa.origin, sofa.size) == ("example.com/behind-the-sofa", 20_852_163)
    assert sofa.text == SOFA.partition("\n\n")[0] + "\n"
    with pytest.raises(Invalid, match="no known key has signed it"):
        open_checkpoint(SOFA, [PublicKey(sofa.origin, bytes(32))])
    hashes = [base64.b64encode(bytes([number] * 32)).decode() for number in range(3)]
    text = "\n".join(["c2sp.org/tlog-proof@v1", "extra YWdl", "index 73894", *hashes, "", SOFA])
    proof = parse_proof(text)
    assert (proof.index, proof.entry, len(proof.path), proof.checkpoint) == (73_894, b"age", 3, SOFA)
    assert proof.text == text


def test_a_checkpoint_says_who_signed_what() -> None:
    checkpoint = Checkpoint(KEY.name, 7, bytes(32))
    note = KEY.signed(checkpoint.text)
    assert open_checkpoint(note, [KEY.public]) == checkpoint
    assert open_checkpoint(note, [OTHER.public, KEY.public]) == checkpoint
    # A witness's line below the log's is none of ours.
    witness = SigningKey("witness.example", bytes(32))
    signed = note + witness.signed(checkpoint.text).rpartition("\n\n")[2]
    assert open_checkpoint(signed, [KEY.public]) == checkpoint
    with pytest.raises(Invalid, match="no known key has signed it"):
        open_checkpoint(note, [OTHER.public])
    for changed in (note.replace("\n7\n", "\n8\n"), note.replace("AAAA=", "AAAE=")):
        assert changed != note
        with pytest.raises(Invalid, match="is not right"):
            open_checkpoint(changed, [KEY.public])
    # A key of another name signs nothing for this log.
    by_witness = witness.signed(checkpoint.text)
    with pytest.raises(Invalid, match="another log's"):
        open_checkpoint(by_witness, [witness.public])
    with pytest.raises(Invalid, match="no known key has signed it"):
        open_checkpoint(by_witness, [witness.public, KEY.public])


def test_a_proof_travels_as_text() -> None:
    entries = [f"entry {number}".encode() for number in range(11)]
    leaves = [leaf_hash(entry) for entry in entries]
    edge, subtree = frontier_of(leaves), subtree_of_leaves(leaves)
    checkpoint = Checkpoint(KEY.name, edge.size, edge.root)
    note = KEY.signed(checkpoint.text)
    for index, entry in enumerate(entries):
        path = tuple(inclusion_proof(index, edge.size, subtree))
        read = parse_proof(InclusionProof(index, path, note, entry).text)
        assert read == InclusionProof(index, path, note, entry)
        assert parse_proof(InclusionProof(index, path, note).text).entry is None
        opened = open_checkpoint(read.checkpoint, [KEY.public])
        assert read.proves(entry, opened)
        assert not read.proves(entry + b" ", opened)


def test_a_key_is_written_and_read_and_never_shown() -> None:
    assert SigningKey.parse(KEY.to_secret_text() + "\n") == KEY
    assert PublicKey.parse(str(KEY.public)) == KEY.public
    secret = KEY.to_secret_text().rpartition("+")[2]
    assert secret not in repr(KEY)
    assert secret not in str(KEY.public)
    for text in ("", "x", secret, str(KEY.public), KEY.to_secret_text()[:-8], KEY.to_secret_text() + "A"):
        with pytest.raises(Invalid) as caught:
            SigningKey.parse(text)
        assert secret not in str(caught.value)
    changed = KEY.to_secret_text().replace("log+", "lag+")
    with pytest.raises(Invalid, match="was changed"):
        SigningKey.parse(changed)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "a+b", "a+b+c+d", "+00000000+AAAA", GO_KEY[:-4], GO_KEY + "AAAA"),
        *(GO_KEY.replace("530d", "530e"), GO_KEY.replace("foo", "bar"), GO_KEY.replace("+Ae", "+Be")),
        *("-----BEGIN PUBLIC KEY-----", "é" * 300 + "+00000000+AA==", "a b+00000000+" + "A" * 44),
    ],
)
def test_what_is_no_public_key_is_refused_by_name(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        PublicKey.parse(text)
    assert caught.value.field in {"public key", "key"}
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "note",
    [
        *(
            "",
            "text",
            "text\n",
            "text\n\n",
            GO_NOTE[:-1],
            GO_NOTE.replace("—", "-"),
            GO_NOTE.replace("=", ""),
        ),
        *(GO_NOTE.replace("\n", "\r\n"), "\n\n" + GO_NOTE.partition("\n\n")[2], GO_NOTE + "more\n"),
        *(GO_NOTE.replace("Uw2Q", "Uw2\0"), GO_NOTE + "— a+b AAAAAAAA\n", GO_NOTE + "— a AAAA\n"),
        *("x" * 100_001, "text\n\n" + "— a AAAAAAAA\n" * 65),
    ],
)
def test_what_is_no_note_is_refused(note: str) -> None:
    with pytest.raises(Invalid):
        open_note(note, [PublicKey.parse(GO_KEY)])


@pytest.mark.parametrize("size", ["", "-1", "+1", "01", "1.0", "1e3", " 1", "１", "9" * 30])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(Invalid, match="size"):
        parse_checkpoint(f"log\n{size}\n{base64.b64encode(bytes(32)).decode()}\n")


@pytest.mark.parametrize(
    "text", ["", "log\n", "log\n1\n", "log\n1\nAAAA\n", "log\n1\n!\n", "log\n\n1\nAAAA\n"]
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="checkpoint"):
        parse_checkpoint(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "c2sp.org/tlog-proof@v2\nindex 1\n\nx",
        "c2sp.org/tlog-proof@v1\n\nx",
        "c2sp.org/tlog-proof@v1\nindex 1\n",
        "c2sp.org/tlog-proof@v1\nindex x\n\nx",
        "c2sp.org/tlog-proof@v1\nextra !\nindex 1\n\nx",
        "c2sp.org/tlog-proof@v1\nindex 1\nAAAA\n\nx",
        "c2sp.org/tlog-proof@v1\nindex 1\n" + f"{base64.b64encode(bytes(32)).decode()}\n" * 65 + "\nx",
        "x" * 1_000_001,
    ],
)
def test_what_is_no_proof_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="proof"):
        parse_proof(text)
