from .config import DeviceConfig as DeviceConfig
from .device import HANDLE_BYTES as HANDLE_BYTES
from .device import OWNERS as OWNERS
from .device import Device as Device
from .device import Memory as Memory
from .device import open_device as open_device
