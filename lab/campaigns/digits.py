"""A small network that learns scikit-learn's digits, in NumPy alone, so that two runs can be compared bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpwell._check import extra

SCHEMA = {"x": ("uint8", (8, 8)), "y": ("int64", ()), "id": ("int64", ())}
HIDDEN = 32
RATE = 0.1
MOMENTUM = 0.9


def digits() -> dict[str, NDArray[Any]]:
    """Return the 1,797 digits as arrays of the fields of `SCHEMA`; ``id`` counts them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(f"this needs scikit-learn: install {extra('examples')}") from None
    images, labels = load_digits(return_X_y=True)
    return {
        "x": images.reshape(-1, 8, 8).astype(np.uint8),
        "y": labels.astype(np.int64),
        "id": np.arange(len(labels), dtype=np.int64),
    }


class Classifier:
    """64 pixels, 32 hidden units, 10 classes; gradient descent with momentum.

    Parameters
    ----------
    seed : int
        Seed of the first weights.

    Attributes
    ----------
    arrays : dict of str to numpy.ndarray
        Weights and momenta, which are its whole state.
    """

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        weights = {
            "w1": random.standard_normal((64, HIDDEN)) / 8,
            "b1": np.zeros(HIDDEN),
            "w2": random.standard_normal((HIDDEN, 10)) / np.sqrt(HIDDEN),
            "b2": np.zeros(10),
        }
        self.arrays = {**weights, **{f"{name}_momentum": np.zeros_like(w) for name, w in weights.items()}}

    def step(self, batch: dict[str, NDArray[Any]]) -> float:
        """Learn from a batch and return the mean loss of the batch (cross entropy) before this step."""
        x, y = batch["x"].reshape(-1, 64) / 16.0, batch["y"]
        rows = np.arange(len(y))
        hidden, scores = self._forward(x)
        scores = scores - scores.max(axis=1, keepdims=True)
        exp = np.exp(scores)
        probability = exp / exp.sum(axis=1, keepdims=True)
        loss = -float(np.log(probability[rows, y]).mean())
        d_scores = probability
        d_scores[rows, y] -= 1
        d_scores /= len(y)
        d_hidden = (d_scores @ self.arrays["w2"].T) * (1 - hidden**2)
        gradients = {
            "w1": x.T @ d_hidden,
            "b1": d_hidden.sum(axis=0),
            "w2": hidden.T @ d_scores,
            "b2": d_scores.sum(axis=0),
        }
        for name, gradient in gradients.items():
            momentum = self.arrays[f"{name}_momentum"]
            momentum *= MOMENTUM
            momentum -= RATE * gradient
            self.arrays[name] += momentum
        return loss

    def accuracy(self, batch: dict[str, NDArray[Any]]) -> float:
        """Return the fraction of a batch that is recognized."""
        _, scores = self._forward(batch["x"].reshape(-1, 64) / 16.0)
        return float((scores.argmax(axis=1) == batch["y"]).mean())

    def _forward(self, x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        hidden = np.tanh(x @ self.arrays["w1"] + self.arrays["b1"])
        return hidden, hidden @ self.arrays["w2"] + self.arrays["b2"]
