"""Everything that knows vLLM. No other package imports it.

Inside vLLM's processes
- `plugin`: vLLM's entry point into Leadout; registers the draft model class
- `draft_model`: the DFlash drafter as vLLM runs it
- `idle_drafter`: a worker whose drafter skips its layers in steps without drafts
- `scheduler`: Leadout's schedulers, which attach the features below to each step
- `live`: connects the schedulers with the draft-length policy
- `fail_safe`: switches a feature off after its first error
- `capture`, `capture_store`: keep the token ids of finished requests
- `rollout`, `hot_swap`, `staging`: follow a registry and replace the drafter of a running server
- `admin`: HTTP endpoints for swaps and status
- `metrics`, `request_metrics`: Prometheus metrics of drafting, over all traffic and by request
- `counters`: sums over the last minute, carried from the engine process to the API process

Starting a server
- `settings`: of `leadout serve`, and of the features above in vLLM's `additional_config`
- `serve_plan`: from `leadout serve` to the command of a vLLM server
- `draft_plan`: what a drafter becomes in it: draft lengths, worker, room in a step, CUDA graphs
- `tuned_plan`: what a file of `leadout tune` becomes in it
- `cuda_graphs`: up to how many requests full CUDA graphs are captured
- `vllm_flags`: parses the user's vLLM flags, makes those of Leadout's features
- `pair`: applies the pairing rules to a vLLM config
- `server`: a vLLM server as a context manager

Engines for other commands
- `child_process`: runs modules in child processes, and guards processes against leaks
- `offline`: text generation without a server
- `draft_recorder`: records the tensors of a running drafter
- `calibration`: step times of servers with and without drafts, for `leadout tune`
- `step_records`, `step_clock`: what each step of such a server did, and how long it took
- `server_turns`: servers that are measured against each other
- `load_test`: load tests of a server, for `leadout bench`
- `installation`: which vLLM is installed, and whether it works

For all of these
- `vllm_adapter`: vLLM's internal classes and functions, for all modules that use them
- `vllm_internals`: the internals in use, and the check that they are as expected
"""
