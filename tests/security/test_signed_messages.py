"""A signed message is opened only by its recipient, and only if the right key signed it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.model.protocol.messages import (
    Alive,
    Answer,
    BadMessage,
    Cancel,
    HostPulses,
    LeaseRenewal,
    Pulse,
    ReportWanted,
    encode,
)
from app.identity.enrolment import Roster
from app.messaging import message_keys, signed_messages
from app.messaging.message_keys import MessageKeys
from app.messaging.signed_messages import (
    Mail,
    heartbeats_in,
    opened_body,
    sealed_heartbeat,
    sealed_host_news,
    sealed_news,
)
from app.storage.signing import HEARTBEAT, NEWS, BadSignature, Signer, public_key

pytestmark = pytest.mark.security

CANCEL = Cancel(task="tsk_1", epoch=1, seq=2)
ABOUT = {"device": "h.0", "incarnation": "1", "sent_us": 3}
RENEWAL, WANTED = LeaseRenewal(**ABOUT, answer=1), ReportWanted(**ABOUT)
PULSE = Pulse(**ABOUT, report=1, answer=1, progress=[[1, 2, 3]])


@pytest.fixture
def island(tmp_path):
    return MessageKeys(Signer.at(tmp_path / "island"))


@pytest.fixture
def other(tmp_path):
    return MessageKeys(Signer.at(tmp_path / "other"))


@pytest.fixture
def host(tmp_path):
    return MessageKeys(Signer.at(tmp_path / "host"))


@pytest.fixture
def mail(host, island):
    return Mail(host, island.public)


def answer(**more):
    given = {"device": "h.0", "incarnation": "1", "sent_us": 1, "lease_us": 2}
    return Answer(**given, heard={}, logged={}, keep=[], drop=[], **more)


def beat(signer, **more):
    facts = {"host": "h", "island": "isle", "kind": "cpu", "key": signer.public}
    given = {"device": "h.0", "incarnation": "1", "sent_us": 1, "facts": facts}
    return Alive(**{**given, "residents": [], "events": [], "logs": [], **more})


def opened_heartbeat(text, *, hosts, keys=None):
    keys = keys or MessageKeys(Signer(Ed25519PrivateKey.generate()))
    (one,) = opened_heartbeats(text, hosts=hosts, keys=keys)
    return one


def opened_heartbeats(text, *, hosts, keys):
    key, body = opened_body(keys, text, hosts=hosts)
    return heartbeats_in(body, text, key)


class TestNews:
    def test_message_of_the_own_island_is_opened(self, island, mail):
        text = sealed_news(island, "h.0", [encode(answer()), encode(CANCEL)])
        assert mail.opened(text) == {"h.0": [answer(), CANCEL]}

    def test_message_may_hold_integers_of_any_size(self, island, mail):
        share = {"task": "t", "epoch": 1, "place": 1, "held_us": 1, "rate": 1}
        told = answer(rota=[{**share, "path": [["a", 2**80, 1]]}])
        assert mail.opened(sealed_news(island, "h.0", [encode(told)])) == {"h.0": [told]}

    def test_news_of_several_devices_of_a_host_are_opened(self, island, other, mail):
        news = {"h.0": [encode(answer()), encode(CANCEL)], "h.1": [encode(RENEWAL)], "h.2": []}
        told = {"h.0": [answer(), CANCEL], "h.1": [RENEWAL], "h.2": []}
        assert mail.opened(sealed_host_news(island, news)) == told
        with pytest.raises(BadSignature):
            mail.opened(sealed_host_news(other, news))

    @pytest.mark.parametrize(
        "body",
        [
            {"device": "h.0"},
            {"device": "h.0", "news": "x"},
            {"device": "../h", "news": []},
            {"device": 1, "news": []},
            {"news": []},
            {"news": {"../h": []}},
            {"news": {"h.0": {}}},
            {"news": {"h.0": [], "h.1": ["x"]}},
        ],
    )
    def test_news_without_a_device_or_a_list_are_refused(self, island, mail, body):
        with pytest.raises(BadMessage):
            mail.opened(signed_messages._sealed(island, NEWS, body, to=""))

    def test_message_signed_by_another_key_is_refused(self, island, other, mail):
        text = sealed_news(other, "h.0", [encode(CANCEL)])
        with pytest.raises(BadSignature, match="may not sign this message"):
            mail.opened(text)
        with pytest.raises(BadSignature, match="not signed by"):
            mail.opened(island.public + text[64:])

    @pytest.mark.parametrize("at", [70, 200, -2])
    def test_changed_message_is_refused(self, island, mail, at):
        text = sealed_news(island, "h.0", [encode(CANCEL)])
        changed = "0" if text[at] != "0" else "1"
        with pytest.raises(BadSignature):
            mail.opened(text[:at] + changed + text[at:][1:])

    def test_heartbeat_and_message_are_not_taken_for_each_other(self, island, mail):
        with pytest.raises(BadSignature):
            mail.opened(sealed_heartbeat(island, beat(island)))
        with pytest.raises(BadSignature):
            opened_heartbeat(sealed_news(island, "h.0", []), hosts={island.public})

    def test_checkpoint_is_not_taken_for_a_message(self, island, mail):
        body = json.dumps({"device": "h.0", "news": [encode(CANCEL)]}).encode()
        with pytest.raises(BadSignature):
            mail.opened(f"{island.public}\n{island._signer.sealed(body).decode()}")

    @pytest.mark.parametrize("text", ["", "\n", "x", "\n\n\n", "é" * 200, "0" * 64 + "\n"])
    def test_unsigned_message_is_refused(self, mail, text):
        with pytest.raises(BadSignature):
            mail.opened(text)

    def test_another_island_is_obeyed_once_the_own_one_has_named_it(self, island, other, mail):
        theirs = sealed_news(other, "h.0", [encode(CANCEL)])
        with pytest.raises(BadSignature):
            mail.opened(theirs)
        mail.opened(sealed_news(island, "h.0", [encode(answer(peers=[other.public]))]))
        assert mail.opened(theirs) == {"h.0": [CANCEL]}

    def test_another_island_may_not_answer(self, island, other, mail):
        mail.opened(sealed_news(island, "h.0", [encode(answer(peers=[other.public]))]))
        with pytest.raises(BadSignature, match="only the device's own island"):
            mail.opened(sealed_news(other, "h.0", [encode(answer(peers=["0" * 64]))]))
        assert mail.peers == (other.public,)

    @pytest.mark.parametrize("told", [RENEWAL, WANTED])
    def test_another_island_may_neither_renew_nor_ask(self, island, other, mail, told):
        mail.opened(sealed_news(island, "h.0", [encode(answer(peers=[other.public]))]))
        with pytest.raises(BadSignature, match="only the device's own island"):
            mail.opened(sealed_news(other, "h.0", [encode(told)]))

    def test_renewal_keeps_the_peers(self, island, other, mail):
        mail.opened(sealed_news(island, "h.0", [encode(answer(peers=[other.public]))]))
        assert mail.opened(sealed_news(island, "h.0", [encode(RENEWAL)])) == {"h.0": [RENEWAL]}
        assert mail.peers == (other.public,)


class TestSharedKeys:
    """Messages between a host and its island, after each has learned the other's exchange key."""

    @pytest.fixture
    def met(self, host, island, mail):
        island.learn(host.public, host.announced)
        assert mail.addressee() == ""
        mail.opened(sealed_news(island, "h.0", [encode(answer())], to=host.public))
        assert mail.addressee() == island.public

    def test_messages_are_proved_without_a_signature(self, met, host, island, mail):
        host._signer = island._signer = None
        said = beat(host)
        text = sealed_heartbeat(host, said, to=mail.addressee())
        assert opened_heartbeat(text, hosts={host.public}, keys=island) == said
        told = sealed_news(island, "h.0", [encode(CANCEL)], to=host.public)
        assert mail.opened(told) == {"h.0": [CANCEL]}

    def test_another_scheduler_of_the_island_opens_them_at_once(self, met, host, island):
        standby = MessageKeys(island._signer)
        text = sealed_heartbeat(host, beat(host), to=island.public)
        assert opened_heartbeat(text, hosts={host.public}, keys=standby) == beat(host)

    def test_no_other_process_opens_them(self, met, host, island, other):
        text = sealed_heartbeat(host, beat(host), to=island.public)
        with pytest.raises(BadSignature, match="its code is not"):
            opened_heartbeat(text, hosts={host.public}, keys=other)

    @pytest.mark.parametrize("at", [0, 70, 200, 300, -2])
    def test_a_changed_message_is_refused(self, met, host, island, at):
        text = sealed_heartbeat(host, beat(host), to=island.public)
        changed = "0" if text[at] != "0" else "1"
        with pytest.raises(BadSignature):
            opened_heartbeat(text[:at] + changed + text[at:][1:], hosts={host.public}, keys=island)

    def test_another_host_cannot_use_its_own_exchange_key(self, met, host, island, other):
        """A forger proves a message with the key that the island shares with the forger."""
        other.learn(island.public, island.announced)
        text = sealed_heartbeat(other, beat(host), to=island.public)
        hosts = {host.public, other.public}
        with pytest.raises(BadSignature, match="not signed by"):
            opened_heartbeat(host.public + text[64:], hosts=hosts, keys=island)
        with pytest.raises(BadSignature, match="another host"):
            opened_heartbeat(text, hosts=hosts, keys=island)

    def test_a_message_is_not_taken_for_one_of_the_receiver(self, met, host, island, mail):
        """Both sides have the same key: a code for one direction is none for the other."""
        text = sealed_heartbeat(host, beat(host), to=island.public)
        reflected = island.public + text[64:]
        reflected = reflected.replace(host.announced, island.announced)
        with pytest.raises(BadSignature, match="its code is not"):
            mail.opened(reflected)

    @pytest.mark.parametrize("public", ["00" * 32, "zz", "é", ""])
    def test_a_signed_exchange_key_of_no_use_is_refused(self, host, island, public):
        signed = host._signer.sealed(public.encode(), message_keys._EXCHANGE_KEY).decode()
        with pytest.raises(BadSignature, match="announced no exchange key"):
            island.learn(host.public, signed.replace("\n", ":"))

    @pytest.mark.parametrize(("told", "counts"), [(RENEWAL, True), (WANTED, False)])
    def test_only_an_answer_shows_that_the_island_knows_the_key(
        self, met, host, island, mail, monkeypatch, told, counts
    ):
        monkeypatch.setattr(mail, "_answered_s", -1e9)
        mail.opened(sealed_news(island, "h.0", [encode(told)], to=host.public))
        assert (mail.addressee() == island.public) == counts

    def test_heartbeats_are_signed_again_if_no_answer_comes(self, met, mail, monkeypatch):
        monkeypatch.setattr(signed_messages, "SIGNS_AFTER_S", -signed_messages.USUAL_BEAT_S)
        assert mail.addressee() == ""


class TestHeartbeats:
    def test_heartbeats_of_one_process_claim_the_same_origin_and_no_others_do(self, island, other):
        claimed = signed_messages.claimed_process(sealed_heartbeat(island, beat(island)))
        later = beat(island, sent_us=2, residents=[], facts={"key": island.public})
        assert signed_messages.claimed_process(sealed_heartbeat(island, later)) == claimed
        assert signed_messages.claimed_process(sealed_heartbeat(island, PULSE)) == claimed
        for signer, more in (
            (other, {}),
            (island, {"device": "h.1"}),
            (island, {"incarnation": "2"}),
            (island, {"incarnation": '1","sent_us":1'}),
        ):
            text = sealed_heartbeat(signer, beat(island, **more))
            assert signed_messages.claimed_process(text) != claimed

    @pytest.mark.parametrize("text", ["", "\n\n", "x", '\n,"sent_us":1'])
    def test_text_without_a_time_of_sending_is_its_own_origin(self, text):
        assert signed_messages.claimed_process(text) == text

    def test_heartbeat_of_an_enrolled_host_is_opened(self, island):
        alive = beat(island)
        assert opened_heartbeat(sealed_heartbeat(island, alive), hosts={island.public}) == alive

    def test_pulse_of_an_enrolled_host_is_opened(self, island):
        assert opened_heartbeat(sealed_heartbeat(island, PULSE), hosts={island.public}) == PULSE

    def test_pulses_of_a_host_are_opened_each_for_its_device(self, island):
        other = replace(PULSE, device="h.1", sent_us=4, progress=[])
        text = sealed_heartbeat(island, HostPulses.of([other, PULSE]))
        found = opened_heartbeats(text, hosts={island.public}, keys=island)
        assert found == [PULSE, other]

    def test_later_pulses_take_the_place_of_those_of_the_same_devices_only(self, island):
        other = replace(PULSE, device="h.1")

        def claimed(*pulses):
            return signed_messages.claimed_process(sealed_heartbeat(island, HostPulses.of(pulses)))

        both = claimed(PULSE, other)
        assert claimed(replace(other, sent_us=9), replace(PULSE, sent_us=8)) == both
        assert claimed(PULSE) != both
        assert claimed(PULSE, replace(other, incarnation="2")) != both

    @pytest.mark.parametrize(
        ("processes", "pulses"),
        [
            ([["h.0", "1"]], []),
            ([], [[3, 1, 1, []]]),
            ([["../h", "1"]], [[3, 1, 1, []]]),
            ([["h.0"]], [[3, 1, 1, []]]),
            ([["h.0", "1"]], [[3, 1, 1]]),
            ([["h.0", "1"]], [[3, 1, -1, []]]),
            ([["h.0", "1"]], [[3, 1, 1, [[1, 2]]]]),
            ([["h.0", "1"]], {"h.0": []}),
        ],
    )
    def test_pulses_that_are_not_well_formed_are_refused(self, island, processes, pulses):
        body = {"is": "HostPulses", "processes": processes, "sent_us": 3, "pulses": pulses}
        text = signed_messages._sealed(island, HEARTBEAT, body, to="")
        with pytest.raises(BadMessage):
            opened_heartbeats(text, hosts={island.public}, keys=island)

    def test_heartbeat_of_an_unknown_host_is_refused(self, island, other):
        with pytest.raises(BadSignature):
            opened_heartbeat(sealed_heartbeat(other, beat(other)), hosts={island.public})

    def test_host_cannot_use_the_key_of_another(self, island, other):
        text = sealed_heartbeat(other, beat(island))
        with pytest.raises(BadSignature, match="another host"):
            opened_heartbeat(text, hosts={island.public, other.public})

    def test_other_signed_messages_are_no_heartbeat(self, island, mail):
        text = signed_messages._sealed(island, HEARTBEAT, encode(CANCEL), to="")
        with pytest.raises(BadMessage):
            opened_heartbeat(text, hosts={island.public})
        with pytest.raises(BadMessage):
            mail.opened(signed_messages._sealed(island, NEWS, {"device": "h.0"}, to=""))

    def test_enrolled_host_speaks_for_its_own_devices_on_its_own_island(self, island, other):
        roster = Roster("isle")
        roster._keys = {"h.0": island.public, "g.0": other.public, "x.0": island.public}
        assert roster.objection(beat(island)) == ""
        facts = beat(island).facts
        for wrong in (
            beat(island, device="g.0"),
            beat(island, device="h.1"),
            beat(island, device="x.0"),
            beat(island, facts={**facts, "island": "east"}),
        ):
            assert roster.objection(wrong)

    def test_enrolled_host_speaks_for_all_its_devices_but_not_for_any_number(self, island, other):
        roster = Roster("isle")
        roster._keys = {"h": island.public, "h.1": other.public, "h.2": ""}
        for name in ("h.0", "h.127"):
            assert roster.objection(beat(island, device=name)) == ""
        # of another host, a revoked one, and names that no host gives to a device
        for name in ("h.1", "h.2", "h.128", "h.x", "h", "hh.0"):
            assert roster.objection(beat(island, device=name)), name

    def test_enrolled_device_is_no_host_of_further_devices(self, island):
        roster = Roster("isle")
        roster._keys = {"h.0": island.public}
        facts = {**beat(island).facts, "host": "h.0"}
        assert roster.objection(beat(island, device="h.0.1", facts=facts))
        assert not roster.has_key("g.0", "")


@pytest.mark.parametrize(
    "metrics",
    [
        '{"loss": NaN}',
        '{"loss": -Infinity}',
        f'{{"loss": 1{"0" * 400}}}',
        '{"loss": 9223372036854775808}',
        r'{"loss": "\ud800"}',
        r'{"loss\u0000": 1}',
        f'{{"loss": {"[" * 100_000}{"]" * 100_000}}}',
        '{"loss": ',
    ],
    ids=lambda metrics: metrics[:24],
)
def test_heartbeat_of_a_known_host_that_postgres_cannot_hold_is_refused(island, metrics):
    view = {"is": "ResidentView", "task": "t", "epoch": 1, "state": "running", "step": 1}
    view |= {"held_us": 1, "order_seq": 1, "memory_bytes": 0, "metrics": "METRICS"}
    body = json.dumps({**encode(beat(island)), "residents": [view]})

    def sent(told):
        sealed = island._signer.sealed(body.replace('"METRICS"', told).encode(), HEARTBEAT)
        return f"{island.public}\n{sealed.decode()}"

    emoji = r'{"loss": "\ud83d\ude00 \\u0000"}'
    kept = opened_heartbeat(sent(emoji), hosts={island.public}).residents[0].metrics
    assert kept == {"loss": "\U0001f600 \\u0000"}
    with pytest.raises(BadMessage):
        opened_heartbeat(sent(metrics), hosts={island.public})


def test_public_key_is_given_directly_or_in_a_file(island, tmp_path):
    island._signer.publish(tmp_path / "island.pub")
    assert public_key(island.public) == public_key(str(tmp_path / "island.pub")) == island.public
    (tmp_path / "bad").write_text("7" * 63)
    for bad in ("", "7" * 63, str(tmp_path / "none"), str(tmp_path / "bad")):
        with pytest.raises(ValueError, match="public key"):
            public_key(bad)
