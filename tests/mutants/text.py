"""Mutants of what clients write, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

SPECIAL = "tests/unit/gateway/requests/test_special_tokens.py"

_BROKEN: list[Broken] = [
    (
        "gateway/requests/prompt.py",
        "a special token in a text counts as one",
        "            ids += self._plain_ids(text, each.field)\n",
        "            ids += self._encode([rendered[each.begin : each.end]])\n",
        SPECIAL,
    ),
    (
        "gateway/requests/prompt.py",
        "a text that the template alters is taken as it stands",
        "                if firm or special.spelled(marked) != special.spelled(rendered):\n",
        "                if False:\n",
        SPECIAL,
    ),
    (
        "gateway/requests/prompt.py",
        "pieces of a special token are not looked at",
        "            if spelled or special.may_take_part(text):\n",
        "            if spelled:\n",
        SPECIAL,
    ),
    (
        "gateway/requests/prompt.py",
        "a template may make special tokens of texts",
        "        if not placed and self._template is not None and self._template.rewrites:\n",
        "        if False and self._template is not None:\n",
        SPECIAL,
    ),
    (
        "gateway/requests/prompt.py",
        "tool calls are dropped where the template has no place for them",
        "            if found not in rendered:\n",
        "            if found in rendered:\n",
        SPECIAL,
    ),
    (
        "gateway/requests/schemas.py",
        "a message with a hint for a cache is refused",
        "    cache_control: Any = None\n    prefix: bool | None = None\n",
        "    prefix: bool | None = None\n",
        "tests/unit/gateway/requests/test_parse.py",
    ),
    (
        "gateway/requests/fields/tools.py",
        "a name may hold markup",
        "NAME.fullmatch(name) is None:\n",
        "NAME.match(name) is None:\n",
        "tests/unit/gateway/requests/test_parse.py",
    ),
    (
        "gateway/http/openai_responses.py",
        "the sampled token is left out of the top ones",
        "    return item.top if is_there else [*item.top, sampled]\n",
        "    return item.top\n",
        "tests/unit/gateway/http/test_openai_responses.py",
    ),
    (
        "gateway/budget/lease.py",
        "what would fit ignores all limits but one",
        "        return all(size.of(meter) <= available for meter, available in left)\n",
        "        return size.of(denied.limit.meter) <= denied.available\n",
        "tests/unit/gateway/budget/test_lease.py",
    ),
    (
        "gateway/upstream/openai/request.py",
        "a client's field goes before what the gateway decides",
        '    found: dict[str, Any] = {**wording.fields, **wording.sampling, "model": model}\n',
        '    found: dict[str, Any] = {"model": model, **wording.fields, **wording.sampling}\n',
        "tests/unit/gateway/upstream/test_capability_trial.py",
    ),
    (
        "gateway/upstream/openai/request.py",
        "a default is sent though the client did not say it",
        '    found["max_tokens"] = max_tokens\n',
        '    found["max_tokens"] = max_tokens\n'
        '    found.setdefault("temperature", submit.sampling.temperature)\n',
        "tests/unit/gateway/upstream/test_openai_response.py::test_only_what_was_asked_for_is_sent",
    ),
]

TEXT_MUTATIONS = mutations_of("text", _BROKEN)
