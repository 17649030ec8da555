"""Options that belong to a shared cache are refused where they would be ignored."""

import numpy as np
import pytest

import warpwell as ww
from warpwell import errors
from warpwell.storage import RamMedium


@pytest.mark.parametrize("options", [{"page_size": 512}, {"stats": "full"}, {"timeout": 3.0}, {"queues": 2}])
def test_an_option_of_a_shared_cache_is_refused(options):
    with (
        ww.Cache("64KiB", device="cpu") as cache,
        pytest.raises(errors.ArgumentError, match=next(iter(options))),
    ):
        ww.open(RamMedium(np.arange(8)), dtype=np.int64, cache=cache, **options)


def test_an_option_that_nobody_has_is_refused():
    with pytest.raises(errors.ArgumentError, match="tiemout"):
        ww.open(RamMedium(np.arange(8)), dtype=np.int64, device="cpu", tiemout=3)
