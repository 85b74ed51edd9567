from tests.inference.conftest import card_is_left as card_is_left
