"""What TideKV reads about the selector: no torch here, so that `tidekv methods` stays quick."""

from tidekv_cli.axes import Parameter, SelectorInfo

MIDDLE = SelectorInfo(
    name="middle",
    target="tidekv_middle.selector:Middle",
    source="a worked example",
    parameters=(Parameter("window", 8, "last tokens always kept"),),
    scores="head",
)
