from .base import (
    PLAIN as PLAIN,  # one thread, the first GPU, no other options
    Array as Array,  # a numpy array of any type
    Availability as Availability,  # whether a backend works on this machine, else what is missing
    Backend as Backend,  # a runtime
    BuildOptions as BuildOptions,  # build options
    Capabilities as Capabilities,  # the support of a backend for Q/DQ models
    Engine as Engine,  # a model ready to run
    Exported as Exported,  # an engine as the runtime's own tools export it to files
    backend_named as backend_named,  # an instance of the backend of that name
)
from .declaring import (
    BackendOptions as BackendOptions,  # all options that a backend accepts
    Declaration as Declaration,  # names and hooks of one backend
    attributes_of as attributes_of,  # the ``__getattr__`` of a package whose attributes load when read
)
from .isolation.environment import (
    Environment as Environment,  # the environment of an interpreter, such as ``next/bin/python``
)
from .isolation.isolated import (
    Isolated as Isolated,  # a backend with every engine in its own child process
)
from .open_engines import (
    Engines as Engines,  # engines of one model, for several runs at once
    HasMemory as HasMemory,  # whether that many more engines can be opened
    MemoryShortError as MemoryShortError,  # memory is not sufficient for all engines at once
    bytes_left as bytes_left,  # memory that processes can still allocate
    engines_at_once as engines_at_once,  # the number of engines that the cores can run at the same time
    has_memory as has_memory,  # whether ``more`` engines can be opened beside these
    is_memory_error as is_memory_error,  # whether an engine may have failed because others were open
)
