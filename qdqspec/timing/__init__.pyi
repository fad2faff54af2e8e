from .bench import (
    CONFIRM_BUILDS as CONFIRM_BUILDS,  # fresh builds of each model in a final measurement
    CONFIRM_ROUNDS as CONFIRM_ROUNDS,  # rounds of such a measurement
    Bench as Bench,  # builds models and times engines of them
)
from .race import (
    Load as Load,  # the inputs for timing at one shape profile
    attach as attach,  # bind the inputs of an engine; returns an engine that times all profiles
    settle as settle,  # run a fresh engine until it is warm, and choose the length of its turns
)
from .stats import (
    BuildTimes as BuildTimes,  # milliseconds of one run on one clock
    builds_of as builds_of,  # split joined samples by build
    preload_scipy as preload_scipy,  # import scipy in the background
)
from .together import (
    FreshBuilds as FreshBuilds,  # times fresh builds, ``jobs`` of which are built in parallel
    Together as Together,  # samples of each group's builds, and why a group has none
)
