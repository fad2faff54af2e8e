from .bench import (
    CONFIRM_BUILDS as CONFIRM_BUILDS,  # fresh builds of each model in a final measurement
    CONFIRM_ROUNDS as CONFIRM_ROUNDS,  # rounds of such a measurement
    FLOOR_EPS as FLOOR_EPS,  # smallest significant difference: one per cent
    Bench as Bench,  # builds models and times engines of them
)
from .environment import (
    Environment as Environment,  # the environment of an interpreter, such as ``next/bin/python``
)
from .lock import (
    DeviceLock as DeviceLock,  # one process of this user at a time times on a device
    RunLock as RunLock,  # locks a results folder for this run
    log_wait as log_wait,  # log a wait, if no progress display shows it
)
from .race import (
    Load as Load,  # the inputs for timing at one shape profile
    attach as attach,  # bind the inputs of an engine; returns an engine that times all profiles
    both_of as both_of,  # two races between different builds as one; won if both were
    profiled as profiled,  # layer times of an engine with this time per run
    settle as settle,  # run a fresh engine until it is warm, and choose the length of its turns
    warmed as warmed,  # run a fresh engine until it is warm, and return its last runs
)
from .stats import (
    Builds as Builds,  # samples of each build
    BuildTimes as BuildTimes,  # milliseconds of one run on one clock
    builds_of as builds_of,  # split joined samples by build
    change_between as change_between,  # the change of the ratio tuned / reference between two runs
    drift as drift,  # the slowdown of the last third of the rounds against the first, over all builds
    preload_scipy as preload_scipy,  # import scipy in the background
    ratio_interval as ratio_interval,  # the ratio tuned / reference, with its interval
    ratio_times as ratio_times,  # the samples of tuned and reference by build
)
from .together import (
    FreshBuilds as FreshBuilds,  # times fresh builds, ``jobs`` of which are built in parallel
    Together as Together,  # samples of each group's builds, and why a group has none
    joined_samples as joined_samples,  # the samples of several builds, one build after the other
)
