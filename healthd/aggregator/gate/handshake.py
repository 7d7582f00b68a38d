"""
The two-step end of a gate that several hooks ask for: decision, acknowledgement by all included, then go for all or for
none.

Pure data. Preflights and the hooks of a group need it; a gate of one hook for the whole job ends with the decision.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """
    Who is to acknowledge and who has, for one decided gate.

    `everyone` was asked for and waits for the outcome; `included` must all acknowledge before `deadline` (monotonic
    seconds). `go` is None until that is settled, and never changes afterwards, so that nobody starts when another was
    told not to. `told` are those who have fetched the outcome or withdrawn, `ended` those whose command is over.
    `withdrawn` is who settled it by not starting; then nobody can say whether the others would have acknowledged.
    """

    everyone: frozenset[str]
    included: frozenset[str]
    deadline: float
    acknowledged: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    go: bool | None = None
    withdrawn: str | None = None

    def acknowledge(self, node: str, now: float) -> Handshake:
        """`node` has read the decision. Once the deadline has passed, or all are here, `go` is settled."""
        if self.go is None and now < self.deadline and node in self.included:
            return dataclasses.replace(self, acknowledged=self.acknowledged | {node}).settle(now)
        return self.settle(now)

    def withdraw(self, node: str, now: float) -> Handshake:
        """`node` does not start, whatever it has acknowledged: nobody does, unless that they go was settled before."""
        settled = dataclasses.replace(self.settle(now), told=self.told | {node})  # it waits for no outcome
        if settled.go is not None or node not in self.included:
            return settled.end(node)
        return dataclasses.replace(settled, withdrawn=node, go=False)

    def settle(self, now: float) -> Handshake:
        """The handshake as of now."""
        if self.go is not None:
            return self
        if self.included <= self.acknowledged:
            return dataclasses.replace(self, go=True)
        return dataclasses.replace(self, go=False) if now >= self.deadline else self

    def tell(self, node: str) -> Handshake:
        """`node` has been given the outcome."""
        return self if self.go is None else dataclasses.replace(self, told=self.told | {node})

    def end(self, node: str) -> Handshake:
        """The command of `node` is over."""
        return dataclasses.replace(self, ended=self.ended | ({node} & self.included))

    @property
    def all_told(self) -> bool:
        """Whether nobody waits for the outcome any more."""
        return self.go is not None and self.everyone <= self.told

    @property
    def over(self) -> bool:
        """Whether the job has ended on all nodes that ran it, so that those who were left out may leave."""
        return self.go is False or (self.go is True and self.included <= self.ended)

    @property
    def missing(self) -> tuple[str, ...]:
        """Why it is not to go: who has withdrawn, or else all who have not acknowledged, sorted."""
        return (self.withdrawn,) if self.withdrawn else tuple(sorted(self.included - self.acknowledged))
