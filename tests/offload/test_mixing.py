"""All of Optax's transformations: those that a step layer by layer takes give the updates of the whole model."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dejax.offload.state.mixing import why_not_by_layers
from tests.cases import slow_but

RNG = np.random.default_rng(0)


def arrays(**shapes):
    return {name: jnp.asarray(RNG.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}


OUTER = arrays(a=(2, 2), b=(2, 2))
LAYERS = [arrays(w=(2, 2), v=(2, 2)) for _ in range(2)]
LONE = [{"w": layer["w"]} for layer in LAYERS]  # one array in each layer
STEPS = 4


def is_w(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "w" in str(path[-1]), tree)


ARGUMENTS = {
    "learning_rate": 0.1, "clipping": 0.01, "eta": 0.1, "gamma": 0.5, "max_consecutive_errors": 2, "max_delta": 0.1,
    "threshold": 0.1, "max_norm": 0.1, "decay": 0.9, "step_size": 0.1, "max_backtracking_steps": 3,
    "max_linesearch_steps": 3, "sync_period": 2, "slow_step_size": 0.5, "l2_norm_clip": 0.1, "noise_multiplier": 0.1,
    "seed": 0, "measure_name": "x", "every_k_schedule": 2, "step_size_fn": lambda count: 0.1 / (count + 1),
    "should_transform_fn": lambda step, **_: step % 2 == 0, "mask": is_w, "freeze_mask": is_w,
    "inner_factory": optax.adam,
    "param_labels": lambda p: jax.tree.map(lambda w: "x" if w else "y", is_w(p)),
    "transforms": {"x": optax.adam(0.1), "y": optax.sgd(0.1)}, "tx": optax.adam(0.1),
}  # fmt: skip
INNER = ("inner", "opt", "optimizer", "base_optimizer", "fast_optimizer", "adv_optimizer")
SPECIAL = {
    "measure_with_ema": lambda: optax.measure_with_ema(lambda g, *_: optax.global_norm(g), 0.9),
    "snapshot": lambda: optax.snapshot("x", lambda g, *_, **__: optax.global_norm(g)),
    "stateless": lambda: optax.stateless(lambda g, p: jax.tree.map(jnp.negative, g)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -g),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=lambda count: 0.1 / (count + 1)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=0.1),
    "chain": lambda: optax.chain(optax.clip(0.1), optax.add_decayed_weights(0.1), optax.trace(0.9)),
    "named_chain": lambda: optax.named_chain(("x", optax.adam(0.1)), ("y", optax.scale(0.5))),
    # Wrappers around what mixes, and what mixes through a wrapper.
    "chain of a norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "flatten of a norm": lambda: optax.flatten(optax.clip_by_block_rms(0.1)),
    "MultiSteps that skips": lambda: optax.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
    "MultiSteps of a norm": lambda: optax.MultiSteps(optax.normalize_by_update_norm(), 2),
    "masked norm": lambda: optax.masked(optax.clip_by_global_norm(0.1), ARGUMENTS["mask"]),
    "partition with a norm": lambda: optax.partition(
        {"x": optax.normalize_by_update_norm(), "y": optax.sgd(0.1)}, ARGUMENTS["param_labels"]
    ),
    "a norm of the last step": lambda: optax.GradientTransformation(
        lambda p: jnp.zeros(()), lambda g, s, p=None: (jax.tree.map(lambda x: x * s, g), optax.global_norm(g))
    ),
    "in a loop": lambda: optax.stateless(
        lambda g, p: jax.lax.fori_loop(0, 2, lambda _, x: jax.tree.map(jnp.tanh, x), g)
    ),
    "a norm in a loop": lambda: optax.stateless(
        lambda g, p: jax.lax.fori_loop(0, 2, lambda _, x: jax.tree.map(lambda y: y * optax.global_norm(x), x), g)
    ),
    "a norm in a branch": lambda: optax.stateless(
        lambda g, p: jax.lax.cond(optax.global_norm(g) > 1.5, lambda x: x, lambda x: jax.tree.map(jnp.negative, x), g)
    ),
}  # fmt: skip


def made(name, factory):
    if name in SPECIAL:
        return SPECIAL[name]()
    given = {}
    for each in inspect.signature(factory).parameters.values():
        needed = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if each.name in INNER:
            given[each.name] = optax.adam(0.1)
        elif needed or each.name == "key":
            given[each.name] = 0 if each.name == "key" else ARGUMENTS[each.name]
    return factory(**given)


def public():
    """Every public function of Optax that returns a transformation."""
    for module in (optax.contrib, optax):
        for name in dir(module):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                member = getattr(module, name)
            returned = str(getattr(member, "__annotations__", {}).get("return", "")) if callable(member) else ""
            if name[0] != "_" and ("GradientTransformation" in returned or name == "MultiSteps"):
                yield name, member


FACTORIES = dict(public()) | dict.fromkeys(SPECIAL)
# Elementwise, with a schedule, with a mask, factored, by the rows of an array, by a norm of one and of all arrays.
QUICK = {
    "adamw",
    "clip_by_global_norm",
    "clip_by_block_rms",
    "lamb",
    "adafactor",
    "masked norm",
    "partition with a norm",
}
QUICK |= {
    "a norm of the last step",
    "a norm in a loop",
    "a norm in a branch",
    "inject_hyperparams",
    "apply_if_finite",
}


def updates(tx, trees):
    """Those of a few steps, each tree updated by itself. The last gradient has a NaN in one array of one layer."""
    rng, states, found = np.random.default_rng(1), [tx.init(tree) for tree in trees], []
    trees = list(trees)
    for step in range(STEPS):
        for i, tree in enumerate(trees):
            leaves, treedef = jax.tree.flatten(tree)
            gradient = [rng.normal(size=x.shape) for x in leaves]
            if step == STEPS - 1 and i == len(trees) - 1:
                gradient[-1][0, 0] = np.nan
            gradient = treedef.unflatten([jnp.asarray(x.astype(np.float32)) for x in gradient])
            change, states[i] = tx.update(gradient, states[i], tree)
            trees[i] = jax.tree.map(jnp.add, tree, change)
            found += jax.tree.leaves(change)
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", slow_but(QUICK, sorted(FACTORIES)))
def test_what_is_taken_updates_as_the_whole_model(name):
    tx = made(name, FACTORIES[name])
    try:
        with jax.disable_jit():  # a branch or a loop is not compiled
            apart = updates(tx, [OUTER, *LAYERS])
            whole = updates(tx, [(OUTER, LAYERS)])
    except (TypeError, ValueError, AttributeError) as error:  # it needs more than gradients and parameters
        for layers in (LAYERS, LONE):
            with pytest.raises(type(error)):
                why_not_by_layers(tx, OUTER, layers[0])
        return
    equal = all(np.allclose(x, y, rtol=1e-5, atol=0, equal_nan=True) for x, y in zip(apart, whole, strict=True))
    for layers in (LAYERS, LONE):
        assert (why_not_by_layers(tx, OUTER, layers[0]) is None) == equal


def test_what_takes_no_other_tree_is_an_error():
    by_name = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: ({"w": -g["w"]}, s))
    with pytest.raises(ValueError, match="`tx` must update trees of any structure, such as that of two layers"):
        why_not_by_layers(by_name, {}, LONE[0])
