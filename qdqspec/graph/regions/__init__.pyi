from .expressions import (
    parse as parse,  # parse an expression
    select_nodes as select_nodes,  # the nodes that rules for patterns allow and deny, and rules that match nothing
)
from .flow import (
    flow_of as flow_of,  # read the data flow of a model
)
from .folding import (
    fold_graph as fold_graph,  # at most ``most`` parts that hold all nodes, in order
)
from .forecast import (
    Forecast as Forecast,  # estimated range of a search's duration in seconds
    forecast_line as forecast_line,  # the estimated time of a search, as a sentence
    forecast_tuning as forecast_tuning,  # estimate the duration of a search with this number of ``builds``
    multiplications_by_node as multiplications_by_node,  # of each node, for one input, and nodes not known
)
from .inspect import (
    InspectSection as InspectSection,  # a section of the report that can stand alone
    Judged as Judged,  # the nodes that a backend's search may quantize, and reasons against the others
    inspect_model as inspect_model,  # count the regions and patterns, and the nodes of ``judged`` by reason
    inspection_text as inspection_text,  # the inspection as text, or ``only`` some sections
    inspection_to_json as inspection_to_json,  # the output of ``inspect --json``, never truncated
)
from .pattern import (
    PatternGranularity as PatternGranularity,  # whether patterns distinguish shapes
    PatternMaker as PatternMaker,  # makes patterns of one model's node sets
)
from .search import (
    find_regions as find_regions,  # cut the graphs of a model into regions
    groups_of as groups_of,  # the nodes of each kernel that computes, in order of execution
)
