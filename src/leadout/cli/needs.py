"""What each command needs beyond the base install; `leadout env` reports from this table."""

from leadout.environment import Need

ENGINE = Need(
    module="vllm", remedy="pip install 'leadout[vllm]' (or 'leadout[cpu]' without an accelerator)"
)

NEEDS: dict[str, tuple[Need, ...]] = {
    "convert": (),
    "env": (),
    "inspect": (),
    "serve": (ENGINE,),
}
