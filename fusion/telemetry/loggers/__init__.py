"""Send the metrics of a run to TensorBoard, Weights & Biases, MLflow, SwanLab, Trackio, or a class of one's own.

    run.loggers=[tensorboard,wandb,my_module:MyLogger]
        │
        registry.check_loggers   known names, installed libraries            when the config is validated
        registry.find_loggers    imports their classes                       before the run has a folder
        LoggerGroup(run, …)      starts them                                 before any worker
          .log(step, metrics)    each of them; one that fails is stopped, reported, and left out from then on
          .close()

Each logger is one file of about thirty lines over its own library, which reads its own settings (WANDB_MODE,
MLFLOW_TRACKING_URI, …). metrics.jsonl is written in any case."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
