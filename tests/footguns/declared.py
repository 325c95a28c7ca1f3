"""Who catches each footgun, and when: declared here, held to by the tests, printed by `profiles/footguns.py`.

What `torch.cuda.graph` alone does is not observed here: it is what the public reports of the row say, or what follows
from torch's documentation of CUDA graphs (Python does not run again, addresses stay). What staticmoe does is checked
after each run of the named test, by what the runners of that test did (`caught` in conftest.py).
"""

from __future__ import annotations

import dataclasses

# What torch.cuda.graph alone does.
RAW = {
    "silent": "silently wrong",
    "error": "an error at capture, about something else",
    "crash": "a crash, or memory that grows",
    "slow": "right, and captured again at every step",
    "right": "right, by torch's documentation",
}
# When staticmoe catches it. The keys are what `caught` tells apart.
CAUGHT = {
    "right": "nothing to catch: right by construction",
    "construction": "audit, where the runner is built: an error with module and line",
    "call": "`step` refuses the call, before it runs",
    "watch": "watch, at the next step: captured anew",
    "guard": "guard, on the device: the step commits nothing",
    "recheck": "`recheck_every`, at the latest N steps later",
}


# Row -> some of its public reports: of torch.cuda.graph itself, or of what is built on graphs or does what they do.
REPORTS = {
    "O1": "pytorch#76368, #77862, #106802", "O2": "torchtitan#4433, pytorch#78124",
    "O3": "pytorch#107853, TransformerEngine#2937, Megatron-LM#4663", "O4": "torchtitan#4146, TensorRT-LLM#14326",
    "O5": "DeepSpeed#8354, #8377", "O6": "Megatron-LM#6999, pytorch#107076",
    "O7": "pytorch#71631, #81558, #84289", "O8": "pytorch#84614, #173421", "O9": "Megatron-LM#5889, pytorch#60691",
    "O10": "pytorch#192343, #78549, Megatron-LM#5401", "O11": "pytorch#129362, sglang#27140",
    "O12": "Dion#108, pytorch#150610", "O13": "Megatron-LM#6958", "O14": "pytorch#188832, #107407",
    "O15": "Megatron-LM#6077, torchtitan#3534", "O16": "pytorch#193402, #190348", "O17": "triton#10596, aiter#5310",
    "O18": "torchtitan#3737, pytorch#118260", "O28": "torchtitan#1593, #3686", "O37": "Megatron-LM#1494, #1507",
    "O39": "DeepSpeed#8620, #1658",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Footgun:
    """One way to go wrong.

    Attributes:
        row: of the survey of public reports; see `REPORTS`.
        wrong: what goes wrong, in a few words.
        raw: key of `RAW`.
        caught: key of `CAUGHT`.
        test: file and test that show it.
    """

    row: str
    wrong: str
    raw: str
    caught: str
    test: str


FOOTGUNS = (
    Footgun("O1", "learning rate, or Adam's step count, frozen", "silent", "right",
            "test_hyperparameters.py::test_the_learning_rate_at_every_distance_from_the_capture"),
    Footgun("O1", "another hyper-parameter frozen", "silent", "watch",
            "test_hyperparameters.py::test_a_changed_hyperparameter_is_used"),
    Footgun("O2", "warm-up and capture train as well", "silent", "right",
            "test_updates.py::test_n_calls_are_n_updates"),
    Footgun("O3", "an old accumulation window is added", "silent", "right",
            "test_updates.py::test_accumulation_counts_every_micro_batch_once"),
    Footgun("O3", "a window with too few micro-batches", "silent", "call",
            "test_updates.py::test_a_short_window_is_refused"),
    Footgun("O4", "a list of losses holds the last one five times", "silent", "right",
            "test_results.py::test_every_result_keeps_its_own_values"),
    Footgun("O5", "the optimizer moves other parameters than the model has", "silent", "right",
            "test_ownership.py::test_the_optimizer_moves_the_users_parameters"),
    Footgun("O6", "a module attribute, closure cell or global frozen", "silent", "watch",
            "test_python_values.py::test_a_module_attribute_that_changes_is_used"),
    Footgun("O6", "a counter in forward stands still", "silent", "construction",
            "test_python_values.py::test_a_counter_that_forward_counts_is_refused"),
    Footgun("O6", "a buffer bound anew in forward", "silent", "construction",
            "test_python_values.py::test_a_buffer_that_forward_rebinds_is_refused"),
    Footgun("O6", "a number that nobody can see", "silent", "recheck",
            "test_python_values.py::test_what_nobody_can_see_is_found_by_the_recheck"),
    Footgun("O7", "autocast's cached copies of weights are stale", "silent", "right",
            "test_precision_and_clipping.py::test_weights_changed_in_place_are_seen_under_autocast"),
    Footgun("O8", "one dropout mask for ever", "right", "right",
            "test_randomness.py::test_every_step_draws_its_own_mask_and_the_backward_uses_it"),
    Footgun("O9", "the clip coefficient frozen", "silent", "right",
            "test_precision_and_clipping.py::test_the_clip_coefficient_is_computed_anew"),
    Footgun("O9", "one infinity turns all weights NaN", "silent", "guard",
            "test_precision_and_clipping.py::test_a_step_that_is_not_finite_changes_nothing"),
    Footgun("O10", "a hidden look at a device value", "error", "construction",
            "test_host_reads.py::test_a_host_read_is_one_error_that_names_it_and_a_good_model_captures_after"),
    Footgun("O11", "after `load_state_dict(assign=True)` old storage is trained", "silent", "call",
            "test_ownership.py::test_assigned_parameters_are_refused"),
    Footgun("O11", "after `p.data = new` old storage is trained", "silent", "watch",
            "test_ownership.py::test_data_that_is_replaced_is_trained_on"),
    Footgun("O12", "a parameter switched on later never moves", "silent", "right",
            "test_ownership.py::test_a_parameter_that_is_switched_on_later_moves"),
    Footgun("O12", "a `requires_grad` that changes is ignored", "silent", "watch",
            "test_ownership.py::test_a_requires_grad_that_changes_is_used"),
    Footgun("O13", "a short batch broadcasts into the static one", "silent", "call",
            "test_batches.py::test_a_short_last_batch_is_refused_with_both_shapes"),
    Footgun("O13", "a mask that was None at capture is ignored", "silent", "call",
            "test_batches.py::test_a_mask_that_was_not_captured_takes_effect_or_is_refused"),
    Footgun("O14", "another thread ends the capture, or lands in it", "error", "right",
            "test_threads.py::test_another_thread_may_allocate_and_train_while_we_capture"),
    Footgun("O14", "a value that another thread made is frozen", "silent", "construction",
            "test_threads.py::test_a_value_of_another_thread_is_refused"),
    Footgun("O15", "gradient nodes of earlier eager steps", "error", "right",
            "test_surroundings.py::test_gradient_nodes_from_before_are_harmless"),
    Footgun("O16", "a deleted graph breaks another", "crash", "right",
            "test_surroundings.py::test_a_dead_runner_takes_nothing_with_it"),
    Footgun("O17", "a gradient added up several times", "silent", "right",
            "test_surroundings.py::test_the_same_step_has_the_same_gradients"),
    Footgun("O18", "a value that moves on every step captures anew each time", "slow", "call",
            "test_hyperparameters.py::test_a_hyperparameter_that_moves_on_every_step_is_an_error"),
    Footgun("O28", "reentrant checkpointing", "error", "construction",
            "test_routing.py::test_reentrant_checkpointing_is_refused"),
    Footgun("O37", "the logged aux loss is another step's", "silent", "right",
            "test_results.py::test_aux_loss_is_the_one_of_its_step_and_evaluation_leaks_into_none"),
    Footgun("O39", "evaluation with training's noise", "silent", "right",
            "test_randomness.py::test_evaluation_is_the_same_every_time"),
)  # fmt: skip
