"""A program for the tests of the launcher that calls the parts of `start()` itself. Arguments as of `launched_program`, and "loop": a loop of its own;
"evaluate": an evaluation at the end."""

import sys
import time

import launched_program

if __name__ == "__main__":
    experiment = launched_program.made()
    experiment.init_dsets()
    experiment.init_envs()
    experiment.init_model()
    experiment.init_dloaders()
    experiment.init_checkpoints()
    experiment.init_logger()
    if "loop" in sys.argv:
        for _ in range(10):
            experiment.collect_new_training_data()
            experiment.train_epoch()
    experiment.learn()
    if "evaluate" in sys.argv:
        time.sleep(1)  # in which the launcher sees that the run is over
        experiment.evaluate_test(launched_program.evaluated, timesteps=100)
    print("learned", experiment.grad_update_counter, experiment.env_steps, flush=True)
    experiment.close()
