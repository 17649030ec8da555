"""Names of what agents can make: those that come with Warpwell are found when one is asked for, and displace none."""

from collections.abc import Iterator

import pytest

from warpwell import errors
from warpwell.pool import services


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(services, "_paths", dict(services._paths))
    monkeypatch.setattr(services, "_stand_ins", dict(services._stand_ins))
    yield


def test_names() -> None:
    for name in ("open", "cache", "store", "scheduler"):
        path = services.path_of(name)
        assert callable(services.find(path))
    assert services.path_of("some.module:thing") == "some.module:thing"
    with pytest.raises(errors.ArgumentError, match=r"there is no service 'none': choose one of .*open"):
        services.path_of("none")


def test_a_name_that_somebody_has_taken_stays_theirs() -> None:
    services.register("cache", "mine:Cache")
    services.register("cache", "warpwell.cache:Cache", provided=True)
    assert services.path_of("cache") == "mine:Cache"
    services.register("cache", "mine:Other")
    assert services.path_of("cache") == "mine:Other"
