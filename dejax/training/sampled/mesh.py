"""Training on mini-batches over the devices of a mesh: `dejax-train --sampled --mesh N`."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from dejax.datasets import HeteroDataset
from dejax.distributed import data_parallel, local, make_mesh, share
from dejax.training.sampled.settings import SampledSettings
from dejax.training.sampled.trainer import SampledState, SampledTrainer


class MeshTrainer(SampledTrainer):
    """A trainer whose steps are divided over devices of this process. The results depend on `settings.parts` alone.

    Args:
        settings: layer and hyperparameters; `parts` is a multiple of the devices.
        data: the data set.
        devices: how many.
        options: of `SampledTrainer`.

    Raises:
        ValueError: more devices than there are, devices that do not divide the parts, or steps of the whole graph.
    """

    def __init__(self, settings: SampledSettings, data: HeteroDataset, *, devices: int, **options: Any) -> None:
        if settings.full_batch:
            raise ValueError("--mesh must not stand with --full-batch, whose steps see the whole graph; leave one out")
        if settings.parts % devices:
            raise ValueError(f"--parts must be a multiple of --mesh, {devices}, got {settings.parts}")
        self.mesh = make_mesh(devices)
        super().__init__(settings, data, **options)
        self._shared = share(self.inputs, self.mesh)

    def init(self, seed: int) -> SampledState:
        """As `SampledTrainer.init`, on the mesh."""
        state: SampledState = share(super().init(seed), self.mesh, writable=True)
        return state

    def exported(self, state: SampledState) -> dict[str, Any]:
        """As `SampledTrainer.exported`: nothing in it depends on the number of devices."""
        return super().exported(local(state))

    def _compiled(self, state: SampledState, order: dict[str, Array]) -> Any:
        if self._step is None:
            step = data_parallel(
                lambda state, key, seeds, inputs: self.part(state, key, seeds, inputs),
                self.updated,
                self.mesh,
                parts=self.settings.parts,
            )
            ready = jax.jit(lambda state_key, number, order: (self._key(state_key, number), self.seeds(number, order)))

            def train(state: SampledState, _: Any, order: dict[str, Array]) -> SampledState:
                key, seeds = ready(state.key, state.step, order)
                after: SampledState = step(state, key, seeds, self._shared)[0]
                return after

            self._step = train
        return self._step

    @staticmethod
    def _key(key: Array, number: Array) -> Array:
        return jax.random.fold_in(jax.random.wrap_key_data(key), number)

    def sampled_accuracy(self, state: SampledState, splits: list[str], seed: int = 0) -> dict[str, float]:
        """As `SampledTrainer.sampled_accuracy`, on one device."""
        return super().sampled_accuracy(local(state), splits, seed)

    def outputs(self, state: SampledState, folder: Any = None, progress: bool | None = None) -> dict[str, Any]:
        """As `SampledTrainer.outputs`, on one device."""
        return super().outputs(local(state), folder, progress)
