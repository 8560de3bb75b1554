"""What `offload` and its kin are told: which residuals of which arguments leave the device, and to which store."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
from jax.extend import core

from dejax._jaxprs import nested
from dejax.offload.activations.residuals import Residual
from dejax.offload.activations.store import ActivationStore

Policy = Callable[[Residual], bool]
Inputs = Literal["auto", "all", "none"] | int | Sequence[int]
Rewrite = Callable[[core.ClosedJaxpr, Sequence[Any], "OffloadOptions"], list[Any]]

MIN_BYTES = 1 << 20


class OffloadKeywords(TypedDict, total=False):
    """The keyword arguments of `offload`, for functions that pass them on."""

    policy: Policy | Iterable[str] | None
    store: ActivationStore | Literal["device"] | None
    inputs: Inputs
    min_bytes: int
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]


@dataclass(frozen=True)
class OffloadOptions:
    """The keyword arguments of `offload`, and what `region` and the Flax bindings add.

    Attributes:
        kept_argnums: arguments that are never stored.
        on_demand: each tensor is stored as soon as it is computed, and fetched just before it is used, see `region`;
            otherwise all are stored and fetched together, which suits one layer.
        rewrite: evaluates the traced function in another way. None: as it is.
    """

    policy: Policy | Iterable[str] | None = None
    store: ActivationStore | Literal["device"] | None = None
    inputs: Inputs = "auto"
    min_bytes: int = MIN_BYTES
    static_argnums: int | Sequence[int] = ()
    static_argnames: str | Sequence[str] = ()
    kept_argnums: tuple[int, ...] = ()
    on_demand: bool = False
    rewrite: Rewrite | None = None

    def __call__(self, residual: Residual) -> bool:
        """Whether a residual is stored in the `ActivationStore`."""
        return residual.nbytes >= max(1, self.min_bytes) and self.wants(residual)

    def wants(self, residual: Residual) -> bool:
        """The policy's answer, whatever the size."""
        answer = as_function(self.policy)(residual)
        if not isinstance(answer, (bool, np.bool_)):
            raise TypeError(
                f"offload: `policy` must return a bool for a Residual, got {answer!r}; policies of jax.checkpoint go "
                "to jax.checkpoint"
            )
        return bool(answer)

    def check_names(self, name: str, jaxpr: core.Jaxpr) -> None:
        """Raises if a name of the policy is given to no tensor of the forward pass."""
        if not isinstance(self.policy, Names):
            return
        # `offload` sees no names inside of loops and jitted functions, `region` does.
        missing = self.policy.names - set(_names(jaxpr, inside=self.on_demand))
        if missing:
            raise ValueError(
                f"offload: `policy` must have names of tensors, got {sorted(missing)[0]!r}, which no tensor of "
                f"`{name}` has; give names that checkpoint_name gives inside of it, outside of jitted functions in it"
            )

    def activations(
        self, num_args: int, avals: Sequence[Any], owner: Sequence[int], outputs: Sequence[Any]
    ) -> list[bool]:
        """For each array of a call's arguments, whether it may leave the device.

        Args:
            num_args: number of positional arguments.
            avals: the shapes and dtypes of the arrays.
            owner: for each its argument's position, -1 for keyword arguments.
            outputs: shapes and dtypes of what the function returns.
        """
        free = [position not in self.kept_argnums for position in owner]
        if self.inputs == "all":
            return free
        if self.inputs == "none":
            return [False] * len(avals)
        if self.inputs == "auto":
            # As many as there are outputs of this shape and dtype, the last ones: a parameter may have the shape of an
            # activation by chance, and parameters come first by custom.
            left = collections.Counter((tuple(out.shape), out.dtype) for out in outputs)
            flags = [False] * len(avals)
            for i in reversed(range(len(avals))):
                kind = (tuple(avals[i].shape), avals[i].dtype)
                if free[i] and left[kind] > 0:
                    left[kind] -= 1
                    flags[i] = True
            return flags
        if isinstance(self.inputs, str):
            raise ValueError(
                f"offload: `inputs` must be 'auto', 'all', 'none' or positions of arguments, got {self.inputs!r}"
            )
        positions = {self.inputs} if isinstance(self.inputs, int) else set(self.inputs)
        if wrong := [p for p in positions if not -num_args <= p < num_args]:
            raise ValueError(f"offload: `inputs` must be positions of the {num_args} arguments, got {wrong[0]}")
        chosen = {p % num_args for p in positions}
        return [position in chosen for position in owner]


def of_module(options: OffloadKeywords) -> OffloadOptions:
    """The options of a function whose argument 0 is a Flax module: its parameters stay on the device.

    Raises:
        ValueError: `static_argnums` names the module.
    """
    if 0 in as_tuple(options.get("static_argnums", ())):
        raise ValueError(
            f"offload: `static_argnums` must not name the module, argument 0, got {options['static_argnums']!r}; "
            "count the other arguments from 1"
        )
    return OffloadOptions(**options, kept_argnums=(0,))


def as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (int, str)) else tuple(value)


@dataclass(frozen=True, slots=True)
class Names:
    """The policy that stores the tensors with some names."""

    names: frozenset[str]

    def __call__(self, residual: Residual) -> bool:
        return bool(self.names & residual.names)


def as_function(policy: Policy | Iterable[str] | None) -> Policy:
    if policy is None:
        return lambda _: True
    if callable(policy):
        function = policy.func if isinstance(policy, functools.partial) else policy
        module = getattr(function, "__module__", None) or type(function).__module__
        if module.partition(".")[0] == "jax":
            raise TypeError(
                "offload: `policy` must be names or a function of a Residual, got a policy of jax.checkpoint; to store "
                "tensors by name write policy=['name']. To recompute the others, too: "
                "offload(jax.checkpoint(fn, policy=...))"
            )
        return policy
    if isinstance(policy, str):
        raise ValueError(
            f"offload: `policy` must be a set of names or a function, got {policy!r}; for one name write "
            f"policy=[{policy!r}]"
        )
    return Names(frozenset(policy))


def _names(jaxpr: Any, inside: bool) -> Iterator[str]:
    """The names that `checkpoint_name` has given to tensors, with `inside` also those in loops and jitted functions."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield str(eqn.params["name"])
        for inner in nested(eqn) if inside else ():
            yield from _names(inner, inside)
