"""Whatever is imported anywhere is there: modules that no other test loads, imports inside functions, scripts."""

import pytest
from support import import_checks


@pytest.mark.filterwarnings("ignore")  # of other people's packages, when they are imported
def test_every_import_leads_somewhere():
    dangling = [line for path in import_checks.sources() for line in import_checks.dangling(path)]
    assert not [*import_checks.import_failures(), *dangling]
