"""The runner: inputs, iteration, guard, commit, programs. Knows the layers only through `StepParticipant`."""
