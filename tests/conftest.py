"""How many tests may be skipped: a suite that skips more than was agreed has stopped testing something."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--max-skipped", type=int, metavar="N", help="fail if more than N tests are skipped")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    allowed = session.config.getoption("--max-skipped")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return  # a worker of pytest-xdist: its controller counts
    skipped = len(reporter.stats.get("skipped", ()))
    if allowed is not None and skipped > allowed:
        reporter.write_line(f"{skipped} tests were skipped, {allowed} may be; see the reasons above")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
