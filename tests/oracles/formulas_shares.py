"""How other systems divide what is there now, and how even a division is (for comparing with F4).

YARN's computed shares, KAI's quota and over-quota, HTCondor's pie, Armada's fair shares and
fairness error, Jain's index: the published formulas, with plain arguments and exact fractions.

Nothing here decides in Roundhouse: its own division is `core.fairness.water_filling`.  Several
resources at once are `tests.oracles.formulas_resources`; usage that was is
`tests.oracles.formulas_history`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from fractions import Fraction

from app.core.fairness.water_filling import Amount, ShareRange, exact, level
from tests.oracles.amounts import above_0
from tests.oracles.formulas_history import kai_time_weights

Amounts = Mapping[str, Amount]

# --- YARN's fair scheduler ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnQueue:
    """A queue of YARN's fair scheduler: its weight, min share and max share (None: no limit)."""

    weight: Amount = 1
    least: Amount = 0
    most: Amount | None = None


def yarn_shares(total: Amount, queues: Mapping[str, YarnQueue]) -> dict[str, Fraction]:
    """YARN's fair shares: clamp(weight * R, min, max) with the R at which they add up to `total`.

    R is found exactly; YARN finds it by 25 bisections and cuts each share to a whole number.  Min
    shares that come to more than the total are all granted, as YARN does: the caller must know.

    Source: Hadoop, ComputeFairShares.java.
    """
    spans = {
        name: ShareRange(
            exact(queue.weight),
            exact(queue.least),
            None if queue.most is None else exact(queue.most),
        )
        for name, queue in queues.items()
    }
    ratio = level(exact(total), spans.values())
    return {name: span.at(ratio) for name, span in spans.items()}


# --- KAI's quota and over-quota -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KaiQueue:
    """A queue of KAI for one resource, in its smallest unit (GPUs, millicores, bytes).

    `deserved` is its quota and `limit` the most it may hold; None: unlimited.  `weight` counts
    over quota.  Queues of higher `priority` are served over quota before others; `created` (any
    clock) breaks ties of whole units, the older first.
    """

    request: Amount
    deserved: Amount | None = 0
    limit: Amount | None = None
    weight: Amount = 1
    priority: int = 0
    created: float = 0

    @property
    def ceiling(self) -> Fraction:
        request = exact(self.request)
        return request if self.limit is None else min(request, exact(self.limit))


def kai_shares(
    total: Amount,
    queues: Mapping[str, KaiQueue],
    *,
    usage: Amounts | None = None,
    k: Amount = 0,
) -> dict[str, Fraction]:
    """KAI's fair share of one resource.

    First everyone gets min(deserved, limit, request), even if that comes to more than `total`.
    What is left goes by priority, highest first.  Within a priority there are rounds: each queue
    that wants more is offered its part by weight of what was left when the round began; it takes
    all it wants, or the whole units of its part; another round follows while somebody wanted less
    than offered.  Then the units that rounding left, one each, by the largest fraction, the oldest,
    the name.  `usage` and `k` bend the weights as `kai_time_weights` says.

    Source: KAI-Scheduler, resource_division.go.
    """
    everything = exact(total)
    parts = {
        name: min(everything if q.deserved is None else exact(q.deserved), q.ceiling)
        for name, q in queues.items()
    }
    left = everything - sum(parts.values())
    for priority in sorted({queue.priority for queue in queues.values()}, reverse=True):
        tier = {name: queue for name, queue in queues.items() if queue.priority == priority}
        if left > 0:
            left, lost = _in_rounds(left, tier, parts, usage or {}, k)
            left = _by_remainder(left, tier, parts, lost)
    return parts


def _in_rounds(
    left: Fraction,
    tier: Mapping[str, KaiQueue],
    parts: MutableMapping[str, Fraction],
    usage: Amounts,
    k: Amount,
) -> tuple[Fraction, dict[str, Fraction]]:
    """Adds whole units to `parts`; what is left, and the fraction that each lost by rounding."""
    lost: dict[str, Fraction] = {}
    again = True
    while again and left:
        pool, again = left, False
        short = {name: queue for name, queue in tier.items() if parts[name] < queue.ceiling}
        weights = kai_time_weights({n: queue.weight for n, queue in short.items()}, usage, k=k)
        together = sum(weights.values())
        for name, weight in weights.items():
            if not weight:
                continue
            offered, wanted = pool * weight / together, tier[name].ceiling - parts[name]
            taken = wanted if wanted <= offered else Fraction(offered // 1)
            lost[name] = Fraction(0) if wanted <= offered else offered - taken
            parts[name] += taken
            left -= taken
            again |= wanted < offered
    return left, lost


def _by_remainder(
    left: Fraction,
    tier: Mapping[str, KaiQueue],
    parts: MutableMapping[str, Fraction],
    lost: Mapping[str, Fraction],
) -> Fraction:
    order = sorted(
        (name for name in lost if lost[name]),
        key=lambda name: (-lost[name], tier[name].created, name),
    )
    for name in order:
        given = min(Fraction(1), left)
        parts[name] += given
        left -= given
    return left


# --- HTCondor's pie -----------------------------------------------------------------------------


def condor_slices(
    pie: Amount, priorities: Amounts, *, used: Amounts | None = None
) -> dict[str, Fraction]:
    """What each submitter may get in one spin of the pie, in slot weight.

    `priorities` are effective user priorities (lower is better), `used` what each holds already.
    share = (max / priority) / sum of (max / priority); the slice is share * pie - used, or 0.

    Source: HTCondor, matchmaker.cpp (calculateSubmitterLimit, calculateNormalizationFactor).
    """
    worth = {name: 1 / above_0(f"{name}: priority", p) for name, p in priorities.items()}
    together, held = sum(worth.values()), used or {}
    return {
        name: max(Fraction(0), exact(pie) * part / together - exact(held.get(name, 0)))
        for name, part in worth.items()
    }


def condor_spins(
    pie: Amount,
    priorities: Amounts,
    wants: Amounts,
    *,
    used: Amounts | None = None,
    floors: Amounts | None = None,
    ceilings: Amounts | None = None,
) -> list[dict[str, Fraction]]:
    """What each submitter gets in each spin of the pie, until a spin gives nothing.

    `pie` is all slot weight, of which `used` is taken; `wants` is what each could use on top.  With
    `floors`, a round before the spins brings submitters up to theirs, within their slices.  In a
    spin the best priority takes first, within its slice, its want, its ceiling (of used and given
    together) and what is left of the pie.  Who has all they want or may have leaves; the others
    spin again for slices of the whole pie.  Slots are divisible here, and nobody is preempted.

    Source: HTCondor, matchmaker.cpp (negotiateWithGroup) and the manual's "Negotiation".
    """
    table = _Pie(exact(pie), priorities, wants, used or {}, ceilings or {})
    spins = [table.spin(floors)] if floors else []
    while any((last := table.spin()).values()):
        spins.append(last)
    return spins


class _Pie:
    """Who holds what of the pie while it is spun."""

    def __init__(
        self, pie: Fraction, priorities: Amounts, wants: Amounts, used: Amounts, ceilings: Amounts
    ) -> None:
        self.pie, self.priorities = pie, priorities
        self.held = {name: exact(used.get(name, 0)) for name in priorities}
        self.left = pie - sum(self.held.values())
        self.goal = {}
        for name, held in self.held.items():
            goal = held + exact(wants.get(name, 0))
            self.goal[name] = min(goal, exact(ceilings[name])) if name in ceilings else goal

    def spin(self, floors: Amounts | None = None) -> dict[str, Fraction]:
        """One spin over all that still want something; up to `floors` only, if given."""
        hungry = {n: p for n, p in self.priorities.items() if self.held[n] < self.goal[n]}
        slices = condor_slices(self.pie, hungry, used=self.held)
        given = dict.fromkeys(self.priorities, Fraction(0))
        for name in sorted(hungry, key=lambda name: exact(hungry[name])):
            want = self.goal[name] - self.held[name]
            if floors is not None:
                want = min(want, max(Fraction(0), exact(floors.get(name, 0)) - self.held[name]))
            given[name] = max(Fraction(0), min(slices[name], want, self.left))
            self.held[name] += given[name]
            self.left -= given[name]
        return given


# --- Armada -------------------------------------------------------------------------------------

RESHARING_ROUNDS = 10
RESHARED_ENOUGH = Fraction(1, 100)  # of the pool: less than this is not shared out again


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmadaShare:
    """Parts of the whole pool, 0 to 1: by weight alone; with what others leave, up to the queue's
    demand; and the same if the queue wanted endlessly much."""

    fair: Fraction
    adjusted: Fraction
    uncapped: Fraction


def armada_shares(weights: Amounts, demands: Amounts) -> dict[str, ArmadaShare]:
    """Armada's fair shares of queues that each want `demands` (parts of the pool, by cost).

    A weight is 1 / priority factor.  In up to 10 rounds, while more than 1 % of the pool is over,
    what queues did not want is offered by weight to those that still want more.

    Source: Armada, scheduling/context/scheduling.go (updateFairShares).
    """
    table = _Resharing(weights, demands)
    for _ in range(RESHARING_ROUNDS):
        if table.over <= RESHARED_ENOUGH or not table.round():
            break
    together = sum(table.weights.values())
    return {
        name: ArmadaShare(
            fair=weight / together, adjusted=table.adjusted[name], uncapped=table.uncapped[name]
        )
        for name, weight in table.weights.items()
    }


class _Resharing:
    """What Armada's queues have so far; `over` is what those that are `served` did not want."""

    def __init__(self, weights: Amounts, demands: Amounts) -> None:
        self.weights = {name: exact(weight) for name, weight in weights.items()}
        self.demands = {name: exact(demands.get(name, 0)) for name in weights}
        self.adjusted = dict.fromkeys(weights, Fraction(0))
        self.uncapped = dict.fromkeys(weights, Fraction(0))
        self.spare = dict.fromkeys(weights, Fraction(0))  # what each left over in the last round
        self.served: set[str] = set()
        self.over = Fraction(1)

    def round(self) -> bool:
        """Offer what is over, by weight, to those not yet served; False if nobody is left."""
        rivals = sum(
            (w for name, w in self.weights.items() if name not in self.served), Fraction(0)
        )
        for name, weight in self.weights.items():
            if name in self.served:  # as if it wanted more; its own leavings do not come back
                mine = weight / (rivals + weight)
                self.uncapped[name] += mine * (self.over - self.spare[name])
            else:
                self.uncapped[name] += weight / rivals * self.over
                self.adjusted[name] += weight / rivals * self.over
        if not rivals:
            return False
        for name, demand in self.demands.items():
            self.spare[name] = max(Fraction(0), self.adjusted[name] - demand)
            if self.spare[name]:
                self.adjusted[name] = demand
                self.served.add(name)
        self.over = sum(self.spare.values(), Fraction(0))
        return True


def armada_theoretical_share(weights: Amounts, demands: Amounts, *, weight: Amount) -> Fraction:
    """The adjusted share of a queue of `weight` that is not there yet and wants everything."""
    newcomer = "\0newcomer"
    shares = armada_shares({**weights, newcomer: weight}, {**demands, newcomer: 2})
    return shares[newcomer].adjusted


def armada_fairness_error(adjusted: Amounts, actual: Amounts) -> Fraction:
    """Sum over queues of what they lack to their adjusted share: max(0, adjusted - actual)."""
    lacks = (exact(part) - exact(actual.get(name, 0)) for name, part in adjusted.items())
    return sum((lack for lack in lacks if lack > 0), Fraction(0))


# --- how even is it? ----------------------------------------------------------------------------


def jain_index(amounts: Amounts, weights: Amounts | None = None) -> Fraction:
    """Jain's index of amounts per weight: (sum x)^2 / (n * sum x^2), from 1/n up to 1 (all equal).

    Nobody, or all with nothing: 1.  Source: Jain, Chiu, Hawe, DEC-TR-301 (1984).
    """
    weighs = {name: above_0(f"{name}: weight", (weights or {}).get(name, 1)) for name in amounts}
    per = [exact(amount) / weighs[name] for name, amount in amounts.items()]
    squares = sum(x * x for x in per)
    return sum(per, Fraction(0)) ** 2 / (len(per) * squares) if squares else Fraction(1)
