"""The constant shapes of one layer on one rank: tokens and capacity in, rows, tiles and bytes out. No torch.

Every size that a captured iteration allocates comes from here, so every bound is proved here.

Dimensions: T tokens per rank, K top_k, E experts (of all ranks), H hidden, I intermediate, R capacity rows,
C rows of one expert, EP ranks that share the experts, BM rows of a tile.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from staticmoe.errors import ConfigError

CAPACITY_SCOPES = ("rank", "expert")


def scaled_ceil(factor: float, count: int, divisor: int = 1) -> int:
    """Return ceil(factor * count / divisor), with `factor` read as the decimal number that it prints as.

    In binary 1.1 * 10 is above 11 and would round up to 12 rows; as the decimal 11/10 it is 11.
    """
    return math.ceil(Fraction(str(factor)) * count / divisor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticShape:
    """Sizes of one layer at one capacity.

    Attributes:
        tokens: T, tokens of one micro-batch on this rank, masked ones included.
        top_k: K, experts chosen by a token.
        num_experts: E, over all ranks.
        hidden: H.
        intermediate: I.
        capacity_factor: against the balanced load; None is dropless.
        capacity_scope: "rank" bounds the rows of the rank, "expert" those of each expert.
        expert_parallel: EP, ranks among which the experts are divided.
        gated: whether the up projection has a gate half (2I columns) or not (I columns).

    Raises:
        ConfigError: a size below 1, more choices than experts, a factor that is not above 0, an unknown scope.
    """

    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    intermediate: int
    capacity_factor: float | None = None
    capacity_scope: str = "rank"
    expert_parallel: int = 1
    gated: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "num_experts", "hidden", "intermediate", "expert_parallel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: expected an integer of at least 1; got {value!r}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k: expected at most num_experts = {self.num_experts}; got {self.top_k}")
        if self.num_experts % self.expert_parallel:
            raise ConfigError(
                f"num_experts: expected a multiple of expert_parallel = {self.expert_parallel}; got {self.num_experts}"
            )
        if self.capacity_scope not in CAPACITY_SCOPES:
            raise ConfigError(f"capacity_scope: expected one of {CAPACITY_SCOPES}; got {self.capacity_scope!r}")
        factor = self.capacity_factor
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"capacity_factor: expected None (dropless) or a finite number above 0; got {factor!r}")

    @property
    def assignments(self) -> int:
        """Assignments of this rank's tokens, T·K."""
        return self.tokens * self.top_k

    @property
    def arrivals(self) -> int:
        """The most rows that can reach this rank: every assignment of every rank, EP·T·K."""
        return self.expert_parallel * self.assignments

    @property
    def local_experts(self) -> int:
        """Experts that this rank holds, E / EP."""
        return self.num_experts // self.expert_parallel

    @property
    def expert_capacity(self) -> int | None:
        """C, the most rows of one expert; None where only the rank is bounded.

        At least 1: ceil of a positive number. At most EP·T·K: an expert cannot receive more rows than there are
        assignments (not EP·T: routing given from outside may name an expert twice for one token).
        """
        if self.capacity_factor is None or self.capacity_scope != "expert":
            return None
        return min(scaled_ceil(self.capacity_factor, self.arrivals, self.num_experts), self.arrivals)

    @property
    def capacity_rows(self) -> int:
        """R, rows of every packed buffer of this layer.

        Scope expert: the sum over the local experts of at most C rows each, and never more than can arrive.
        Scope rank: ceil(f·T·K), the balanced load of a rank times the factor. On one rank no more than T·K rows
        can arrive, so rows beyond that could only stay empty.
        """
        if self.capacity_factor is None:
            return self.arrivals
        if self.expert_capacity is not None:
            return min(self.local_experts * self.expert_capacity, self.arrivals)
        return min(scaled_ceil(self.capacity_factor, self.assignments), self.arrivals)

    @property
    def can_overflow(self) -> bool:
        """Whether some routing has more rows than fit. False: victims need not be looked for at all.

        Without a bound per expert R >= EP·T·K holds every arrival. With one, an expert may be sent everything.
        """
        if self.expert_capacity is not None:
            return self.expert_capacity < self.arrivals
        return self.capacity_rows < self.arrivals

    @property
    def pre_width(self) -> int:
        """Columns of the pre-activation: 2I with a gate, I without."""
        return 2 * self.intermediate if self.gated else self.intermediate

    def max_tiles(self, block_m: int) -> int:
        """Return the most tiles of `block_m` rows that any routing needs, each tile inside one expert.

        Raises:
            ConfigError: `block_m` below 1.
        """
        if block_m < 1:
            raise ConfigError(f"block_m: expected at least 1; got {block_m}")
        # An expert with n > 0 rows needs ceil(n/BM) <= (n + BM - 1)/BM tiles. At most m = min(E, R) experts have
        # rows, and the rows sum to at most R: the sum is at most (R + m(BM - 1))/BM, and it is an integer.
        occupied = min(self.local_experts, self.capacity_rows)
        tiles = (self.capacity_rows + occupied * (block_m - 1)) // block_m
        if self.expert_capacity is not None:
            tiles = min(tiles, self.local_experts * -(-self.expert_capacity // block_m))
        return tiles

    def saved_bytes(self, element_size: int) -> int:
        """Return the bytes that the expert block keeps for its backward: x [T,H] and the pre-activation [R,2I]."""
        return element_size * (self.tokens * self.hidden + self.capacity_rows * self.pre_width)
