"""A live server over a scripted model, and a home for each client; only where clients are asked for.

Installing them needs the network and a minute or two, so a plain run skips these tests: `make test-clients`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from clients.environments import Environments
from support.live_server import SETTINGS, Live, serve

KEY = "a-key"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the clients alone unless the command line names their marker."""
    if "clients" not in config.getoption("-m"):
        skip = pytest.mark.skip(reason="installs clients from the network: make test-clients")
        for item in items:
            if item.get_closest_marker("clients"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def environments(request: pytest.FixtureRequest) -> Iterator[Environments]:
    """All clients that the selected tests need, installed in the background and kept for the next run."""
    wanted = {item.callspec.params["client"] for item in request.session.items
              if item.get_closest_marker("clients")}  # fmt: skip
    made = Environments(request.config.cache.mkdir("clients"), sorted(wanted))
    yield made
    made.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Live]:
    """One for all clients, behind a key."""
    with serve(replace(SETTINGS, api_keys=(KEY,))) as live:
        yield live


@pytest.fixture
def ask(environments: Environments, server: Live):
    """Runs a client's script with what the model is to say, by name; gives what the script has found."""

    def run(client: str, says: dict[str, str]) -> dict:
        markers = {name: server.lm.say(text) for name, text in says.items()}
        base = f"{server.base}/v1"
        found = environments.run(
            client, {"base_url": base, "api_key": KEY, "model": server.served.name, "say": markers}
        )
        server.wait_idle()
        return found

    return run
