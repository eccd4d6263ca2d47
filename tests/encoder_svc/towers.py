"""A vision tower that tests can afford."""

from encoder_svc.model.vision import VisionTower
from tests.tiny_models import tiny_config, tiny_model


def tiny_tower() -> VisionTower:
    """The tower of the tiny model, with its weights, in eval mode."""
    model = tiny_model(tiny_config())
    tower = VisionTower(model.config.vision_config)
    tower.load_state_dict(model.model.visual.state_dict())
    return tower.eval()
