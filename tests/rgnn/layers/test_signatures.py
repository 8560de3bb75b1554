"""Signatures of the Flax modules: those that editors read in stubs are those that calls have."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flax import nnx

import dejax.rgnn.linen as linen_layers
import dejax.rgnn.nnx as nnx_layers
from dejax.rgnn import _linen_layer, _nnx_layer

HEAD = '''\
"""For editors and type checkers: the arguments of each layer, as its specification has them.

`pytest --update-golden tests/rgnn/layers/test_signatures.py` writes this file.
"""

'''
IMPORTS = {
    "nnx": """\
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dejax.rgnn._nnx_layer import NnxLayer
from dejax.rgnn._nnx_layer import ProgramModule as ProgramModule
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers.parameters import Initializer
from dejax.rgnn.layers.parameters import params_from_linen as params_from_linen
from dejax.rgnn.layers.parameters import params_to_linen as params_to_linen
from dejax.rgnn.options import Options
""",
    "linen": """\
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dejax.rgnn._linen_layer import LinenLayer
from dejax.rgnn._linen_layer import ProgramModule as ProgramModule
from dejax.rgnn.layers.parameters import Initializer
from dejax.rgnn.options import Options
""",
}
OF_FLAX = {"parent": "parent: Any = ...", "name": "name: str | None = None"}
"""Arguments of every linen module, whose types are Flax's own."""


def argument(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}: {parameter.annotation}"
    if parameter.name in OF_FLAX:
        return OF_FLAX[parameter.name]
    default = getattr(parameter.default, "__name__", parameter.default)
    written = f"jnp.{default}" if isinstance(parameter.default, type) else repr(default)
    text = f"{parameter.name}: {parameter.annotation}"
    return text if parameter.default is parameter.empty else f"{text} = {written}"


def definition(name: str, first: str, signature: inspect.Signature, result: str, indent: str) -> str:
    """A function of a stub, with several arguments a line."""
    arguments = [first] if first else []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        arguments.append(argument(parameter))
    words = " ".join(f"{a},".replace(" ", "\N{NO-BREAK SPACE}") for a in arguments)
    lines = textwrap.fill(words, 119 - len(indent), initial_indent=f"{indent}    ", subsequent_indent=f"{indent}    ")
    lines = lines.replace("\N{NO-BREAK SPACE}", " ").replace("'", '"').rstrip(",")
    return f"{indent}def {name}(\n{lines}\n{indent}) -> {result}: ...\n"


def stub(module: ModuleType, base: type) -> str:
    """The text of a module's stub."""
    parts = [HEAD + IMPORTS[module.__name__.rpartition(".")[2]]]
    for name in module.__all__:
        value: Any = getattr(module, name)
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            signature = inspect.signature(value)
            parts.append(definition(name, "", signature, signature.return_annotation, ""))
        elif inspect.isclass(value) and issubclass(value, base):
            sentence = value.__doc__.splitlines()[0].split(". ")[0].removesuffix(".")
            text = f'class {name}({base.__name__}):\n    """{sentence}."""\n\n'
            text += definition("__init__", "self", inspect.signature(value), "None", "    ")
            if name == "RGCNConv" and base is _nnx_layer.NnxLayer:
                featureless = inspect.signature(value.featureless)
                method = definition("featureless", "cls", featureless, featureless.return_annotation, "    ")
                text += f"    @classmethod\n{method}"
            parts.append(text)
    return "\n".join(parts)


@pytest.mark.parametrize(
    ("module", "base"),
    [(nnx_layers, _nnx_layer.NnxLayer), (linen_layers, _linen_layer.LinenLayer)],
    ids=["nnx", "linen"],
)
def test_stubs_have_the_signatures(module: ModuleType, base: type, request: pytest.FixtureRequest) -> None:
    path = Path(str(module.__file__)).with_suffix(".pyi")
    text = stub(module, base)
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "if the change is meant, run pytest --update-golden"


def test_a_subclass_has_its_own_arguments() -> None:
    """Its documentation and its fields, too: they are not replaced by those of the specification."""

    class Mine(nnx_layers.GCNConv):
        """A layer of a fixed width."""

        def __init__(self, width: int, rngs: nnx.Rngs) -> None:
            super().__init__(width, width, rngs=rngs)

    assert list(inspect.signature(Mine).parameters) == ["width", "rngs"] and Mine.__doc__ == "A layer of a fixed width."
    assert Mine(3, nnx.Rngs(0)).weight[...].shape == (3, 3)

    class Scaled(linen_layers.GCNConv):
        scale: float = 2.0

    assert Scaled(4, scale=3.0).scale == 3.0 and Scaled(4).features == 4
