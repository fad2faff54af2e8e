from .fields import (
    CURE as CURE,  # the advice for such a path
    LEADS_OUT as LEADS_OUT,  # message for a path that leads out of the root
    Format as Format,  # a number format, by name
    Fraction as Fraction,  # a number, or a share such as ``5%``
    MetricLimits as MetricLimits,  # limits of a task metric, in the search and in the check ``accuracy``
    Number as Number,  # a finite number
    Positive as Positive,  # a finite number above 0
    is_id as is_id,  # whether the text can be part of a test id
    path_rules as path_rules,  # the restriction of a spec file
    short_form as short_form,  # lets short values stand for what ``expand`` makes of them
)
from .inline import (
    Asked as Asked,  # options of a case
    AskedWithStrategy as AskedWithStrategy,  # options of a case, with a search strategy by name
    GivenModel as GivenModel,  # a model as a path or in memory
    PathLike as PathLike,  # a path or its text
    data_source as data_source,  # the data of a path or a table as in a spec; messages name it ``word``
    inline_case as inline_case,  # the case of a model and options
    with_words as with_words,  # a case with the given options in place of its spec's
)
from .kinds import (
    BackendName as BackendName,  # a registered backend, by name
    LintTargetName as LintTargetName,  # a target of lint rules, by name
    OptimizerName as OptimizerName,  # an optimizer of the check ``survival``, by name
)
from .models import (
    Spec as Spec,  # the checks of one quantized model, with its data and rules
    load_spec as load_spec,  # read and validate a spec file
    spec_schema as spec_schema,  # the JSON Schema (draft 2020-12) of a spec file
)
from .problems import (
    Problem as Problem,  # one problem and its position
    excerpt as excerpt,  # lines of a file around ``line``, with a caret below the column
    source_lines as source_lines,  # the lines as the YAML reader counts them
    spec_error as spec_error,  # all problems of a file as one error, by position
)
