from .app.api import (
    compare as compare,  # two run records
    find_culprits as find_culprits,  # the Q/DQ pairs that cost the most accuracy
    find_regions as find_regions,  # the regions of a model
    measure as measure,  # the time of a model
    render as render,  # a run record as text or a page
    tune as tune,  # search, measure and check one model
    verify as verify,  # the difference between two models' outputs
)
from .app.session import (
    Session as Session,  # several cases with one backend, cache and device lock
)
from .app.session.result import (
    Result as Result,  # what a search returns
)
from .app.session.study import (
    Study as Study,  # a search that the caller runs step by step
)
from .errors import (
    QdqspecError as QdqspecError,  # every error that a user can meet
)
from .spec.models import (
    Spec as Spec,  # a spec as Python writes it
    load_spec as load_spec,  # read and validate a spec file
)

__version__: str
