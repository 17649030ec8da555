"""The tests of page sets for all devices, on `cpu`, with both readers of bulk requests."""

from collections.abc import Iterator

import pytest
from tests.harness.arrays.page_sets import PageSetConformance
from tests.harness.cufile import file_of, install_fake


class TestPageSets(PageSetConformance):
    DEVICE = "cpu"


class TestPageSetsByCuFile(PageSetConformance):
    DEVICE = "cpu"

    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        file_of(tmp_path_factory.mktemp("direct") / "x", range(1000)).close()
        fake = install_fake(monkeypatch)
        yield
        assert not fake.registrations

    def test_waves_are_read_by_it(self, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
        fake = install_fake(monkeypatch)
        self.test_waves_cover_marked_items_in_order(tmp_path)
        assert fake.bytes_read > 1000 and not fake.registrations
