"""The simulated vLLM and the real one answer the probes as the table says (see engine_table.py)."""

from __future__ import annotations

import pytest

from tests.contract.engine_servers import SimulatedServer
from tests.vllm.engine_rigs import REAL_FLAGS, SIMULATED_FLAGS
from tests.vllm.engine_table import PAGE, observe, read_golden, table

pytestmark = pytest.mark.timeout(600)


def test_every_row_is_equal_or_explained() -> None:
    unexplained = [
        title for title, row in read_golden().items() if (row["real"] == row["simulated"]) == bool(row["why"])
    ]
    assert unexplained == []


def test_the_page_is_made_of_the_golden_file() -> None:
    assert PAGE.read_text() == table(read_golden()), "run: python -m tests.vllm.engine_table --write"


async def test_the_simulated_engine_answers_as_the_table_says() -> None:
    server = SimulatedServer(*SIMULATED_FLAGS)
    try:
        seen = await observe(server.url)
    finally:
        server.stop()
    assert seen == {
        title: row["simulated"] for title, row in read_golden().items() if row["simulated"] != "none"
    }


async def test_the_real_engine_answers_as_the_table_says(request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("real_servers").get(*REAL_FLAGS)
    seen = await observe(server.url)
    assert seen == {title: row["real"] for title, row in read_golden().items() if row["real"] != "none"}
