"""Float32 copies of narrow parameters, as part of an optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dejax._optional import optional


class MasterState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
        master: the parameters in a wide dtype.
        inner: the state of the wrapped transformation.

    >>> import jax.numpy as jnp, optax
    >>> from dejax.offload import master_weights
    >>> state = master_weights(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.bfloat16)})
    >>> state.master["w"].dtype, type(state).__name__
    (dtype('float32'), 'MasterState')
    """

    master: Any
    inner: Any


def master_weights(tx: Any, dtype: Any = jnp.float32) -> Any:
    """Trains parameters of a narrow dtype (bfloat16) by copies of a wide one, which are part of the optimizer's state.

    The model reads bfloat16 parameters. `tx` updates the copies, and the parameters become the rounded copies. So no
    small update is lost. The copies lie where the state lies. In host memory (`stack_step(moments="host")`,
    `offload.optimizer`) they leave 2 bytes for each parameter on the device instead of 4. Over the bus 12 bytes then
    travel each way instead of 8.

    Args:
        tx: an Optax transformation.
        dtype: of the copies.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Its updates have the wide dtype; `optax.apply_updates` rounds their
        sum with the parameters to the dtype of these.

    Raises:
        TypeError: `tx` is no Optax transformation; as it is traced: `update` gets no parameters.
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
