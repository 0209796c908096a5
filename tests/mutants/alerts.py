"""Mutants of alerts and webhooks, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

OUTBOX = "tests/integration/test_outbox.py"
CONDITIONS = "tests/unit/tenants/outbox/test_conditions.py"

_BROKEN: list[Broken] = [
    (
        "tenants/outbox/incidents.py",
        "what is over is not told",
        "    told = [(each, None) for each in fired] + [(each, now_us) for each in changes.resolved]\n",
        "    told = [(each, None) for each in fired]\n",
        f"{OUTBOX}::test_an_incident_is_told_once_when_it_fires_and_once_when_it_is_over",
    ),
    (
        "tenants/outbox/outbox.py",
        "a tenant's events overtake one that failed",
        "        ~is_behind,\n",
        "",
        f"{OUTBOX}::test_a_failure_holds_back_its_tenant_alone_and_is_tried_again_under_its_id",
    ),
    (
        "tenants/outbox/outbox.py",
        "a claim is no claim",
        "        outbox.c.claimed_until_us <= now_us,\n",
        "",
        f"{OUTBOX}::test_what_a_killed_sender_had_claimed_is_sent_by_another_after_its_claim",
    ),
    (
        "tenants/outbox/outbox.py",
        "one that was too slow has the last word",
        '    is_mine = (outbox.c.seq == sent.seq, outbox.c.sender == sender, outbox.c.state == "pending")\n',
        "    is_mine = (outbox.c.seq == sent.seq,)\n",
        f"{OUTBOX}::test_what_a_killed_sender_had_claimed_is_sent_by_another_after_its_claim",
    ),
    (
        "tenants/outbox/address.py",
        "a private address is taken",
        "    if not allows_private and not all(map(is_public, addresses)):\n",
        "    if False:\n",
        "tests/unit/tenants/outbox/test_address.py",
    ),
    (
        "gateway/alerts/sender.py",
        "the address is looked up when the webhook is added, and never again",
        "            address = await address_of(target, allows_private=self._allows_private)\n",
        "            address = await address_of(target, allows_private=True)\n",
        f"{OUTBOX}::test_a_private_address_is_refused_when_it_is_added_and_when_it_is_sent_to",
    ),
    (
        "tenants/slo/slo.py",
        "one miss is an alert",
        "short.burn_rate(per_mille), long.missed >= least_misses)",
        "short.burn_rate(per_mille), True)",
        f"{CONDITIONS}::test_few_misses_are_no_alert_and_neither_is_a_target_that_is_gone",
    ),
    (
        "tenants/outbox/transitions.py",
        "what could not be looked at is over",
        "        elif incident.subject not in looked_at and incident.subject in BY_SUBJECT:\n",
        "        elif False:\n",
        "tests/unit/tenants/outbox/test_transitions.py",
    ),
    (
        "tenants/outbox/incidents.py",
        "a gateway without the lease evaluates",
        "    if not take_lease(connection, gateway_id, now_us, lease_us):\n        return None\n",
        "    take_lease(connection, gateway_id, now_us, lease_us)\n",
        f"{OUTBOX}::test_the_lease_is_one_gateways_until_it_runs_out_or_is_given_up",
    ),
]
ALERT_MUTATIONS = mutations_of("alerts", _BROKEN)
