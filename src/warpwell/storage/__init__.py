"""Media, and the controller that serves queues from them."""

from .controller import Controller, service_threads
from .faulty import Faulty
from .file import FileMedium
from .key_value_faulty import KeyValueFaulty
from .key_value_latency import KeyValueLatency
from .latency import Latency
from .medium import PENDING, Medium, NativeMedium
from .presets import DRIVES, Drive
from .python_medium import PythonMedium
from .ram import RamMedium
from .replicated import Replicated
from .striped import Striped
