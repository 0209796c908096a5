"""Every choice and option of a policy, set on one running server; its effect is counted from decisions.

The tests are named after what they show: `docs/policies.md` lists them. Where requests must wait side by
side the engine is held (SIGSTOP) until the gateway has sent them all, so that no clock decides. Steps are
counted by the number of the step in which a request, and the one after it, was admitted.
"""

from __future__ import annotations

import random
import signal
import string
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from engine.scheduling.options import OPTIONS
from ops.cli.main import cli
from ops.sandbox import step_shares
from tests.support.server_process import MODEL, Server, server_process, until

STEP_TOKENS = 64
PLACES = 4
POOL_TOKENS = 1536
SIZES = ["--engine-max-batched-tokens", str(STEP_TOKENS), "--engine-max-sequences", str(PLACES)]
SIZES += ["--engine-kv-blocks", str(POOL_TOKENS // 16), "--engine-context", str(POOL_TOKENS)]
SIZES += ["--engine-host-kv-blocks", "0", "--gateway-quote-credit", "0"]


class ServedEngine:
    """One server, its policy set live, and what its engine decided."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.keys: dict[str, str] = {}
        self.random = random.Random(11)
        self.threads = ThreadPoolExecutor(64)
        self.client = httpx.Client(base_url=server.url, timeout=60.0)
        self.engine_pid = server.engine()
        self.owner = {"authorization": f"Bearer {server.owner_key}"}

    def set(self, policy: str = "vtc", **options: Any) -> None:
        """Sets the policy; options that are not named are the defaults."""
        answer = self.client.post(
            "/admin/v1/policy", json={"policy": policy, "options": options}, headers=self.owner
        )
        assert answer.status_code == 200, answer.text
        changed = {name: value for name, value in options.items() if value != OPTIONS[name].default}
        assert answer.json()["engines"][0]["options"] == changed

    def text(self, tokens: int) -> str:
        """A prompt of that many tokens, which is in no cache."""
        return "".join(self.random.choices(string.ascii_letters, k=tokens))

    def run(
        self,
        *prompts: int | str,
        answer: int = 1,
        tenant: str = "one",
        ignore_eos: bool = True,
        tier: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Runs one request of some prompts (a length, or its text); returns its id."""
        if tenant not in self.keys:
            tiers = ["interactive", "standard", "batch"]
            self.keys[tenant] = self.server.tenant(tenant, tiers=tiers)
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": answer,
            "ignore_eos": ignore_eos,
            "temperature": 0,
        }
        body["prompt"] = [each if isinstance(each, str) else self.text(each) for each in prompts]
        if not ignore_eos:  # its length is not known before, and it does not end by itself
            body["logit_bias"] = {"0": -100}
        if tier:
            body["service_tier"] = tier
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        if timeout_s is not None:
            headers["x-fairgate-timeout-s"] = str(timeout_s)
        response = self.client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        request_id: str = response.json()["fairgate"]["request_id"]
        return request_id

    def begin(self, *prompts: int | str, **asked: Any) -> Future[str]:
        """As `run`, beside others."""
        return self.threads.submit(self.run, *prompts, **asked)

    def decisions(self, request_id: str = "", kind: str = "") -> list[dict[str, Any]]:
        """Decisions about a request (of all), oldest first."""
        answer = self.client.get("/admin/v1/policy?decisions=256", headers=self.owner).json()
        found = answer["engines"][0]["decisions"]
        return [
            each
            for each in found
            if each["sequence_id"].startswith(request_id) and kind in ("", each["kind"])
        ]

    def records(self, after: int = 0) -> list[dict[str, Any]]:
        """What the last steps computed, by tenant; those after step `after`."""
        shown = self.client.get("/admin/v1/policy?decisions=0&steps=4096", headers=self.owner).json()
        return [each for each in shown["engines"][0]["steps"] if each["step"] > after]

    def most_decodes(self, *prompts: int, **asked: Any) -> int:
        """Most tokens of answers in one step of a request."""
        until(self.server.is_idle)
        last = self.records()[-1:]
        with self.held():  # so that all its prompts are there before the first step
            running = self.begin(*prompts, **asked)
            self.until_running(1)
        running.result(60)
        after: int = last[0]["step"] if last else 0
        return max(sum(map(int, each["decodes"].values())) for each in self.records(after))

    def admitted(self, request_id: str) -> list[int]:
        """The steps in which its sequences were first admitted."""
        first: dict[str, int] = {}
        for each in self.decisions(request_id, "admit"):
            first.setdefault(each["sequence_id"], each["step"])
        return sorted(first.values())

    def apart(self, *prompts: int, **asked: Any) -> int:
        """Steps from the first to the last admission of one request's prompts."""
        with self.held():
            running = self.begin(*prompts, **asked)
            self.until_running(1)
        steps = self.admitted(running.result(60))
        assert len(steps) == len(prompts)
        return steps[-1] - steps[0]

    def steps(self, *prompts: int, **asked: Any) -> int:
        """Steps from a request's first admission to the next request's."""
        with self.held():
            running = self.begin(*prompts, **asked)
            self.until_running(1)
        first = self.admitted(running.result(60))[0]
        return self.admitted(self.run(1))[0] - first

    @contextmanager
    def held(self) -> Iterator[None]:
        """The engine stands still."""
        self.engine_pid.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.engine_pid.send_signal(signal.SIGCONT)

    def lined_up(self, *asked: dict[str, Any], one_by_one: bool = True) -> list[int]:
        """Requests that wait side by side, in this order of arrival; in which order they were admitted."""
        running: list[Future[str]] = []
        with self.held():
            for each in asked:
                given = dict(each)
                running.append(self.begin(given.pop("prompt"), **given))
                if one_by_one or len(running) == len(asked):
                    self.until_there(len(running))
        ids = [each.result(60) for each in running]
        order = [each["sequence_id"].partition(".")[0] for each in self.decisions(kind="admit")]
        return sorted(range(len(ids)), key=lambda index: order.index(ids[index]))

    def has_sent(self, number: int) -> bool:
        """Whether that many of the gateway's requests are at the engine."""
        status = self.client.get("/admin/v1/status", headers=self.owner).json()
        return bool(status["running"] >= number)

    def until_running(self, number: int) -> None:
        until(lambda: self.has_sent(number))

    def until_there(self, number: int) -> None:
        """Until that many requests wait or run."""

        def are_there() -> bool:
            status = self.client.get("/admin/v1/status", headers=self.owner).json()
            return bool(status["running"] + sum(status["queued"].values()) >= number)

        until(are_there)

    def is_running(self, number: int) -> bool:
        """Whether the engine runs that many sequences."""
        [engine] = self.server.status()["engines"]
        return bool(engine["running"] == number)

    @contextmanager
    def full(self, prompt: int = 80, answer: int = 300, **asked: Any) -> Iterator[Future[str]]:
        """All places are taken by sequences of one request, which need all memory, and then run to
        their end."""
        seen = len(self.decisions(kind="admit"))
        before = self.decisions(kind="admit")[-1]["step"] if seen else 0
        running = self.begin(*[prompt] * PLACES, answer=answer, **asked)
        until(lambda: sum(each["step"] > before for each in self.decisions(kind="admit")) == PLACES)
        yield running
        running.result(60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[ServedEngine]:
    with server_process(tmp_path_factory.mktemp("options"), chat_model, *SIZES) as running:
        engine = ServedEngine(running)
        yield engine
        engine.threads.shutdown()
        engine.client.close()


@pytest.fixture(autouse=True)
def idle(served: ServedEngine) -> None:
    until(served.server.is_idle)


# ---------------------------------------------------------------- order

LONG, SHORT = {"prompt": 60, "answer": 40}, {"prompt": 12, "answer": 2}
ALIKE = {"prompt": 30, "answer": 4}


def test_order_fcfs(served: ServedEngine) -> None:
    served.set("vtc", order="fcfs")
    assert served.lined_up(LONG, SHORT, ALIKE) == [0, 1, 2]


def test_order_hrrn(served: ServedEngine) -> None:
    served.set("vtc", order="hrrn", batch_size=1, admit="static")
    # Both wait while the first is served, which is more of the short one's size.
    assert served.lined_up(ALIKE | {"answer": 60}, LONG, SHORT) == [0, 2, 1]


def test_order_sjf(served: ServedEngine) -> None:
    served.set("vtc", order="sjf")
    assert served.lined_up(LONG, SHORT) == [1, 0]


def test_order_srpt(served: ServedEngine) -> None:
    served.set("vtc", order="srpt")
    assert served.lined_up(LONG, SHORT) == [1, 0]


def test_order_priority(served: ServedEngine) -> None:
    served.set("vtc", order="priority")
    # The length counts the more, the more wait.
    assert served.lined_up(ALIKE, LONG, SHORT) == [0, 2, 1]


def test_order_edf(served: ServedEngine) -> None:
    served.set("vtc", order="edf")
    # Inside a tenant its client's word counts; without one it is due after 30 seconds.
    assert served.lined_up(ALIKE, ALIKE | {"timeout_s": 20.0}) == [1, 0]


def least_served_first(served: ServedEngine, order: str) -> None:
    """Of two tenants the one that was served less goes first, though it came last."""
    served.set("vtc", order=order)
    for _ in range(3):
        served.run(1000, answer=10, tenant=f"much-{order}")
    served.run(10, tenant=f"little-{order}")
    until(served.server.is_idle)
    much = ALIKE | {"tenant": f"much-{order}"}
    little = ALIKE | {"tenant": f"little-{order}"}
    assert served.lined_up(much, much, little)[0] == 2


def test_order_vtc(served: ServedEngine) -> None:
    least_served_first(served, "vtc")


def test_order_hybrid(served: ServedEngine) -> None:
    least_served_first(served, "hybrid")


def test_order_drr(served: ServedEngine) -> None:
    one, two = ALIKE | {"tenant": "turn-one"}, ALIKE | {"tenant": "turn-two"}
    served.set("vtc", order="fcfs")
    assert served.lined_up(one, two, one, two) == [0, 1, 2, 3]
    until(served.server.is_idle)
    served.set("vtc", order="drr")
    assert served.lined_up(one, two, one, two) == [0, 2, 1, 3], "a quantum of one tenant, then the other's"


def test_order_dlpm(served: ServedEngine) -> None:
    served.set("vtc", order="dlpm")
    prefix = served.text(64)
    served.run(prefix + served.text(8))
    until(served.server.is_idle)
    cached = {"prompt": prefix + served.text(8), "answer": 4}
    assert served.lined_up(ALIKE, ALIKE, cached)[0] == 2


def test_order_las(served: ServedEngine) -> None:
    assert interrupted_by_order(served, "las")


def test_order_mlfq(served: ServedEngine) -> None:
    assert interrupted_by_order(served, "mlfq")
    assert not interrupted_by_order(served, "fcfs")


def beside_a_full_engine(
    served: ServedEngine, tier: str | None = None, newcomer: str | None = None, answer: int = 260
) -> str:
    """Runs a short request that comes when all places are taken; returns its id. By default there is memory
    for it, whenever it comes."""
    while True:
        with served.full(answer=answer, tier=tier) as crowd, served.held():
            coming = served.begin(8, tier=newcomer)
            until(lambda crowd=crowd: crowd.done() or served.has_sent(2))
        request_id = coming.result(60)
        at_s = served.decisions(request_id, "admit")[0]["at_s"]
        records = served.records()
        admitted = next(index for index, each in enumerate(records) if each["at_s"] > at_s)
        # On a busy machine the crowd may have begun to end before the engine stood still: those of it that
        # run do not become more again then.
        after = map(step_shares.decoding, records[admitted + 1 :])
        if records[admitted - 1]["waiting"] or max(after, default=0) == PLACES:
            return request_id


def interrupted_by_order(served: ServedEngine, order: str) -> bool:
    """Whether a newcomer takes the place of one that had much."""
    served.set("vtc", order=order)
    newcomer = beside_a_full_engine(served)
    lost = [each for each in served.decisions(kind="pause") if newcomer in str(each["others"])]
    assert all(each["rule"] == f"place lost by order {order}" for each in lost)
    return bool(lost)


def test_order_buckets(served: ServedEngine) -> None:
    # A long prompt after two short ones, about: the engine stands still, and 60 of them one by one take too
    # long on a slow machine.
    asked = [LONG | {"prompt": 200, "answer": 1}, SHORT, SHORT] * 20

    def changes(order: str) -> int:
        """How often the admitted ones change between the lengths."""
        until(served.server.is_idle)
        served.set("vtc", order=order)
        order_of_admission = served.lined_up(*asked, one_by_one=False)
        return sum(before != after for before, after in pairwise(i % 3 == 0 for i in order_of_admission))

    assert changes("fcfs") > 20
    assert changes("buckets") < 15, "like lengths one after the other"


# ---------------------------------------------------------------- admit and its options

SEVERAL = {"max_num_partial_prefills": 4}


def test_admit_predicted_reserve(served: ServedEngine) -> None:
    served.set("vtc", admit="predicted-reserve", reserve_permille=1000)
    assert served.apart(500, 500, answer=300) > 200, "what the first will need is set aside"


def test_reserve_permille(served: ServedEngine) -> None:
    served.set("vtc", reserve_permille=0)
    assert served.apart(500, 500, answer=200) < 30


def test_admit_prompt_only(served: ServedEngine) -> None:
    served.set("vtc", admit="prompt-only", reserve_permille=1000)
    assert served.apart(500, 500, answer=300) < 30


def test_admit_static(served: ServedEngine) -> None:
    served.set("vtc", admit="static", batch_size=2)
    with served.held():
        running = served.begin(20, 20, 20, 20, answer=30)
        served.until_running(1)
    first, second, third, last = served.admitted(running.result(60))
    assert (second - first, last - third) == (0, 0)
    assert third - first >= 30, "the second batch begins when the first has ended"


def test_batch_size(served: ServedEngine) -> None:
    served.set("vtc", admit="static", batch_size=1)
    assert served.apart(20, 20, answer=30) >= 30
    until(served.server.is_idle)
    served.set("vtc", admit="static", batch_size=0)
    assert served.apart(20, 20, answer=30) == 0


def test_admit_dynamic(served: ServedEngine) -> None:
    served.set("vtc", admit="dynamic", batch_size=1, window_s=0.0)
    assert served.apart(20, 20, answer=30) >= 30


def test_window_s(served: ServedEngine) -> None:
    served.set("vtc", admit="dynamic", batch_size=2, window_s=0.8)
    assert took_s(served) >= 0.8, "it waits for a second one"
    until(served.server.is_idle)
    served.set("vtc", admit="dynamic", batch_size=2, window_s=0.0)
    assert took_s(served) < 0.8


def took_s(served: ServedEngine) -> float:
    """Seconds between the admission of a request that came alone and that of the one before it."""
    served.run(20)
    last = served.decisions(kind="admit")[-1]
    served.run(20)
    return float(served.decisions(kind="admit")[-1]["at_s"] - last["at_s"])


def test_admit_buckets(served: ServedEngine) -> None:
    served.set("vtc", admit="buckets", order="fcfs", suspend_after_s=3600, **SEVERAL)
    assert served.apart(600, 100) >= 8, "prompts of unlike lengths do not advance side by side"


def test_bucket_ratio(served: ServedEngine) -> None:
    served.set("vtc", admit="buckets", order="fcfs", suspend_after_s=3600, bucket_ratio=16, **SEVERAL)
    assert served.apart(600, 300) <= 1


def suspended(served: ServedEngine, **options: Any) -> list[dict[str, Any]]:
    """Decisions about a long prompt and two short ones that came just after it."""
    until(served.server.is_idle)
    served.set("vtc", admit="buckets", order="fcfs", **SEVERAL, **options)
    with served.held():
        running = served.begin(600, 20, 20)
        served.until_running(1)
    return served.decisions(running.result(60))


def test_suspend_after_s(served: ServedEngine) -> None:
    for after_s, number in ((0.0, 1), (3600, 0)):
        made = suspended(served, suspend_after_s=after_s)
        assert sum(each["kind"] == "suspend" for each in made) == number


def test_longest_pause_s(served: ServedEngine) -> None:
    last_short = {}
    for longest_s in (0.0, 3600):
        made = suspended(served, suspend_after_s=0.0, longest_pause_s=longest_s)
        [pause] = [each["step"] for each in made if each["kind"] == "suspend"]
        shorts = [each["step"] for each in made if each["sequence_id"].endswith(".2")]
        last_short[longest_s] = max(shorts) - pause
    assert last_short[0.0] > last_short[3600]


def test_admit_peak(served: ServedEngine) -> None:
    served.set("vtc", admit="peak")
    assert served.apart(500, 500, answer=300) > 60


def test_peak_headroom_permille(served: ServedEngine) -> None:
    served.set("vtc", admit="peak")
    assert served.apart(500, 500, answer=100) < 20
    until(served.server.is_idle)
    served.set("vtc", admit="peak", peak_headroom_permille=500)
    assert served.apart(500, 500, answer=100) >= 100


def test_peak_quantile_permille(served: ServedEngine) -> None:
    served.set("vtc", admit="peak", peak_quantile_permille=500)
    near = served.apart(420, 420, answer=360, ignore_eos=False, tenant="median")
    until(served.server.is_idle)
    served.set("vtc", admit="peak", peak_quantile_permille=1000)
    far = served.apart(420, 420, answer=360, ignore_eos=False, tenant="longest")
    assert near < 20 < far, "room for all that the answers may be"


def test_peak_jump_permille(served: ServedEngine) -> None:
    last_after = {}
    for jump in (0, 500):
        tenant = f"jump-{jump}"
        for _ in range(8):  # its answers are short, as far as is known
            served.run(8, 8, 8, 8, answer=20, ignore_eos=False, tenant=tenant)
        until(served.server.is_idle)
        quantile = {"peak_quantile_permille": 500, "peak_jump_permille": jump}
        served.set("vtc", admit="peak", **quantile, **SEVERAL)
        lower = served.begin(1000, answer=500, tier="batch")
        until(lambda: served.is_running(1))
        with served.held():
            # A higher tier takes the memory of one that runs: too much had been let in.
            higher = served.begin(800, tier="interactive")
            served.until_running(2)
            after = served.begin(200, 200, answer=1000, ignore_eos=False, tenant=tenant)
            served.until_running(3)
        first, second = served.admitted(after.result(60))
        last_after[jump] = second - first
        lost = served.decisions(lower.result(60), kind="preempt")[0]
        assert higher.result(60) in str(lost["others"])
        until(served.server.is_idle)
    assert last_after[0] == 0
    assert last_after[500] > 40, "it goes by a higher quantile for a while"


def test_small_lane_permille(served: ServedEngine) -> None:
    # 46 blocks, 3 and 46: one of 96 is left over, and the small one holds two.
    prompts = (719, 20, 719)
    served.set("vtc", order="fcfs", small_lane_permille=0, reserve_permille=1000, **SEVERAL)
    assert served.apart(*prompts, answer=18) < 8
    until(served.server.is_idle)
    served.set("vtc", order="fcfs", small_lane_permille=500, reserve_permille=1000, **SEVERAL)
    assert served.apart(*prompts, answer=18) > 12, "large ones leave as much as small ones hold"


def test_admit_table(served: ServedEngine, table: Path) -> None:
    served.set("vtc", admit="table", table=str(table))
    batches = Counter(served.admitted(served.run(20, 20, 20, 20, answer=30)))
    assert max(batches.values()) <= 2
    gaps = [after - before for before, after in pairwise(sorted(batches))]
    assert gaps, "there is more than one batch"
    assert min(gaps) >= 30, "and each runs to its end before the next begins"


def test_table(served: ServedEngine, table: Path) -> None:
    other = table.with_name("other.json")
    arguments = ["--rates", "1,4", "--max-batch", "4", "--slo-s", "0.2", "--wait-buckets", "4"]
    assert CliRunner().invoke(cli, ["policy", "solve", *arguments, "--out", str(other)]).exit_code == 0
    served.set("table", table=str(other))
    assert served.apart(20, 20, 20, 20, answer=30) < 30, "the other table's batches take four"


# ---------------------------------------------------------------- compose and its options


def test_compose_decode_first(served: ServedEngine) -> None:
    served.set("vtc", compose="decode-first")
    assert 5 <= served.steps(300) <= 7


def beside_several(served: ServedEngine, **options: Any) -> set[int]:
    """Tokens of a tenant's long prompt in steps in which three prompts of another tenant had more to come."""
    until(served.server.is_idle)
    served.run(1, tenant="one-prompt")
    served.set("vtc", max_num_partial_prefills=3, **options)
    after = served.records()[-1]["step"]
    with served.held():
        running = [served.begin(500, tenant="one-prompt")]
        served.until_running(1)
        running.append(served.begin(250, 250, 250, tenant="several-prompts"))
        served.until_running(2)
    for each in running:
        each.result(60)
    ids = {each["name"]: each["id"] for each in served.server.admin("GET", "/tenants?limit=1000")["data"]}
    one, several = ids["one-prompt"], ids["several-prompts"]
    contested = [
        each["prompts"].get(one, 0)
        for each in served.records(after)
        if each["waiting_prompt_tokens"].get(one) and each["waiting_prompt_tokens"].get(several, 0) > 300
    ]
    assert len(contested) > 5
    return set(contested[2:])


def test_cap_tokens(served: ServedEngine) -> None:
    assert min(beside_several(served)) > 16, "by weight: about half of each step"
    assert beside_several(served, cap_tokens=16) == {16}


def test_slots(served: ServedEngine) -> None:
    for slots, most in (("auto", 4), (0, 4), (2, 2), (1, 1)):
        served.set("vtc", slots=slots)
        assert served.most_decodes(8, 8, 8, 8, answer=40) == most


def test_compose_token_fair(served: ServedEngine) -> None:
    for compose, tokens in (("decode-first", 2), ("token-fair", 1)):
        served.set("vtc", compose=compose, **({"slots": 1} if compose == "token-fair" else {}))
        assert served.most_decodes(8, 8, answer=40) == tokens


def test_compose_lanes(served: ServedEngine) -> None:
    served.set("vtc", compose="decode-first")
    mixed = served.steps(8, 600, answer=20)
    until(served.server.is_idle)
    served.set("vtc", compose="lanes")
    assert served.steps(8, 600, answer=20) > mixed + 5, "a step advances prompts or answers"


def test_long_prefill_token_threshold(served: ServedEngine) -> None:
    served.set("vtc", compose="decode-first", max_num_partial_prefills=2, long_prefill_token_threshold=20)
    assert 15 <= served.steps(300) <= 17


def test_long_chunk_permille(served: ServedEngine) -> None:
    common = {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 40}
    served.set("vtc", compose="decode-first", **common, long_chunk_permille=1000)
    assert 8 <= served.steps(300) <= 10
    until(served.server.is_idle)
    served.set("vtc", compose="decode-first", **common, long_chunk_permille=500)
    assert served.steps(300) <= 7, "as much as is not felt: on this machine whole steps"


def test_max_num_partial_prefills(served: ServedEngine) -> None:
    served.set("vtc", compose="decode-first", max_num_partial_prefills=1)
    assert served.apart(300, 300) >= 4
    until(served.server.is_idle)
    served.set("vtc", compose="decode-first", max_num_partial_prefills=2, max_long_partial_prefills=2)
    assert served.apart(300, 300) <= 1


def test_max_long_partial_prefills(served: ServedEngine) -> None:
    common = {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 30}
    served.set("vtc", compose="decode-first", **common, max_long_partial_prefills=1)
    one = served.steps(300, 300)
    until(served.server.is_idle)
    served.set("vtc", compose="decode-first", **common, max_long_partial_prefills=2)
    assert served.steps(300, 300) < 0.75 * one, "both advance"


def test_least_chunk_tokens(served: ServedEngine) -> None:
    served.set("vtc", compose="decode-first", target_step_s=1e-6, least_chunk_tokens=32)
    assert 10 <= served.steps(300) <= 12


def test_target_step_s(served: ServedEngine) -> None:
    served.set("vtc", compose="decode-first", target_step_s=1e-6)
    assert 19 <= served.steps(300) <= 21, "16 tokens a step whatever the target"
    until(served.server.is_idle)
    served.set("vtc", compose="decode-first", target_step_s=0)
    assert 5 <= served.steps(300) <= 7


def steps_beside_a_long_prompt(served: ServedEngine, **options: Any) -> int:
    """Steps of an answer of 100 tokens, with a long prompt that comes beside it."""
    until(served.server.is_idle)
    served.set("vtc", order="fcfs", compose="slack", **options)
    running: list[Future[str]] = []
    with served.held():
        for prompt, answer in ((8, 100), (900, 1)):
            running.append(served.begin(prompt, answer=answer))
            served.until_running(len(running))
    first = min(served.admitted(running[0].result(60)))
    running[1].result(60)
    return served.admitted(served.run(1))[0] - first


def test_compose_slack(served: ServedEngine) -> None:
    late = steps_beside_a_long_prompt(served, ttft_target_s=0.001, tpot_target_s=3600)
    assert late > 110, "the answer lends its tokens to a prompt that would be late"


def test_ttft_target_s(served: ServedEngine) -> None:
    assert steps_beside_a_long_prompt(served, ttft_target_s=3600, tpot_target_s=3600) < 105


def test_tpot_target_s(served: ServedEngine) -> None:
    close = steps_beside_a_long_prompt(served, ttft_target_s=0.001, tpot_target_s=0.0001)
    assert close < 105, "an answer that is late itself lends nothing"


# ---------------------------------------------------------------- evict, places, pauses


def test_max_displacements(served: ServedEngine) -> None:
    for most in (0, 3):
        until(served.server.is_idle)
        served.set("vtc", max_displacements=most)
        # Those that lose no place have all their memory from the start, which is all there is.
        newcomer = beside_a_full_engine(served, "batch", "interactive", answer=260 if most else 300)
        lost = [each for each in served.decisions(kind="pause") if newcomer in str(each["others"])]
        assert len(lost) == (1 if most else 0)


def lost_to_its_like(served: ServedEngine, rule: str, **options: Any) -> int:
    """How often memory was taken by this rule for a sequence of the same request, while another one of it was
    paused for a higher tier."""
    until(served.server.is_idle)
    served.set("vtc", admit="prompt-only", **SEVERAL, **options)
    with served.full(prompt=250, answer=250) as running:
        with served.held():
            higher = served.begin(8, answer=150, tier="interactive")
            served.until_there(2)
        higher.result(60)
    lost = served.decisions(running.result(60), kind="preempt")
    return sum(each["rule"] == rule and higher.result() not in str(each["others"]) for each in lost)


def test_paused_keep_s(served: ServedEngine) -> None:
    # Who grows when memory is full is chance; it may be the one of the higher tier, which takes it anyway.
    assert any(lost_to_its_like(served, "paused", paused_keep_s=0.0) for _ in range(10))
    for _ in range(3):
        assert lost_to_its_like(served, "paused", paused_keep_s=3600) == 0


def victims(served: ServedEngine, evict: str, *prompts: int) -> set[str]:
    """Which prompts of a request, by index, lost their memory when the answers no longer fitted."""
    until(served.server.is_idle)
    served.set("vtc", order="fcfs", admit="prompt-only", evict=evict, **SEVERAL)
    with served.held():
        running = served.begin(*prompts, answer=300)
        served.until_running(1)
    lost = served.decisions(running.result(60), kind="preempt")
    assert lost
    assert {each["rule"] for each in lost} == {f"evict {evict}"}
    return {each["sequence_id"].partition(".")[2] for each in lost}


BEGINS_LATE = (900, 60)
"""The first, long one emits its first token after the second."""
ALL_ALONG = (700, 500)


def test_evict_fair_victim(served: ServedEngine) -> None:
    assert victims(served, "fair-victim", *BEGINS_LATE) == {"0"}, "of one tenant what emitted least"


def test_evict_latest_victim(served: ServedEngine) -> None:
    assert victims(served, "latest-victim", *BEGINS_LATE) == {"1"}, "what was admitted last"


def test_evict_attained_victim(served: ServedEngine) -> None:
    assert victims(served, "attained-victim", *ALL_ALONG) == {"0"}, "what was computed most"
