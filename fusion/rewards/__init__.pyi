from .config import RewardConfig as RewardConfig
from .fields import check_required_fields as check_required_fields
from .guard import RewardPool as RewardPool
from .outcome import RewardOutcome as RewardOutcome
from .outcome import RewardSample as RewardSample
from .outcome import reward_metrics as reward_metrics
