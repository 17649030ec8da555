"""Names of what agents can make: those that come with Warpwell are there from the start, and may be taken."""

from collections.abc import Iterator

import pytest

from warpwell import errors, registry


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_paths", {kind: dict(paths) for kind, paths in registry._paths.items()})
    yield


def test_names() -> None:
    for name in ("open", "create", "cache", "array part", "store", "scheduler"):
        assert callable(registry.load(registry.path_of("service", name)))
    assert registry.path_of("service", "some.module:thing") == "some.module:thing"
    with pytest.raises(errors.ArgumentError, match=r"there is no service 'none': choose one of .*open"):
        registry.path_of("service", "none")


@pytest.mark.parametrize("kind", ["stand-in", "scheduler"])
def test_every_path_that_comes_with_warpwell_leads_to_something(kind: str) -> None:
    for path in registry._paths[kind].values():
        assert isinstance(registry.load(path), type)


def test_a_name_that_somebody_has_taken_stays_theirs() -> None:
    registry.register("service", "cache", "mine:Cache")
    registry.load(registry.path_of("stand-in", "open"))  # importing what comes with Warpwell registers nothing again
    assert registry.path_of("service", "cache") == "mine:Cache"
    registry.register("service", "cache", "mine:Other")
    assert registry.path_of("service", "cache") == "mine:Other"


def test_a_path_names_a_module_and_an_attribute() -> None:
    with pytest.raises(errors.ArgumentError, match="give 'module:callable'"):
        registry.register("service", "cache", "mine.Cache")
