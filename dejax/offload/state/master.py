"""Float32 copies of narrow parameters, as part of an optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dejax._optional import optional


class MasterState(NamedTuple):
    """The optimizer state of `master_weights`.

    Attributes:
        master: the copies of the parameters in the wide dtype (float32).
        inner: the state of the wrapped Optax transformation.

    >>> import jax.numpy as jnp, optax
    >>> from dejax.offload import master_weights
    >>> state = master_weights(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.bfloat16)})
    >>> state.master["w"].dtype, type(state).__name__
    (dtype('float32'), 'MasterState')
    """

    master: Any
    inner: Any


def master_weights(tx: Any, dtype: Any = jnp.float32) -> Any:
    """Wraps an Optax transformation so that bfloat16 parameters are trained through float32 copies (master weights).

    The model reads the bfloat16 parameters. `tx` updates the float32 copies, which are part of the optimizer's state,
    and the parameters become the rounded copies, so that small updates are not lost. If the optimizer's state lies in
    host memory (`stack_step(moments="host")`, `offload.optimizer`), so do the copies: the device then holds 2 bytes of
    each parameter instead of 4, and the bus moves 12 bytes each way for each parameter in a step of Adam instead of 8.

    Args:
        tx: an Optax transformation.
        dtype: dtype of the copies.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Its updates have the wide dtype; `optax.apply_updates` rounds the
        sum of update and parameter to the dtype of the parameter.

    Raises:
        TypeError: `tx` is no Optax transformation; or, when traced, `update` is called without parameters.
    """
    with optional("optax", of="offload.master_weights"):
        import optax

    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"offload.master_weights: `tx` must be an Optax transformation, got {type(tx).__name__}")
    tx = optax.with_extra_args_support(tx)

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    def init(params: Any) -> MasterState:
        master = jax.tree.map(lambda x: jnp.array(x, dtype), params)  # a copy, also of parameters that are wide
        return MasterState(master, tx.init(master))

    def update(updates: Any, state: MasterState, params: Any = None, **extra: Any) -> tuple[Any, MasterState]:
        if params is None:
            raise TypeError("offload.master_weights: `params` must be given to update, got None")
        updates, inner = tx.update(wide(updates), state.inner, state.master, **extra)
        master = jax.tree.map(lambda m, u: (m + u).astype(dtype), state.master, updates)
        return jax.tree.map(lambda m, p: m - p.astype(dtype), master, params), MasterState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)
