"""The time of a step from a profiler's trace: exposed collectives, copies and waits for the host, by unit.

    report = overlap_report(read_trace(Path("trace.json")))
    print(as_text(report))

`torch.profiler` exports the trace. The units of lamella and of FSDP2 leave ranges of the same names.
"""

from lamella_trace._account import overlap_report as overlap_report
from lamella_trace._files import write_report as write_report
from lamella_trace._html import as_html as as_html
from lamella_trace._report import HostGap as HostGap
from lamella_trace._report import KernelTimeline as KernelTimeline
from lamella_trace._report import NodeReport as NodeReport
from lamella_trace._report import OverlapReport as OverlapReport
from lamella_trace._report import PlacedKernel as PlacedKernel
from lamella_trace._report import Role as Role
from lamella_trace._report import StepReport as StepReport
from lamella_trace._report import Traffic as Traffic
from lamella_trace._report import UnitReport as UnitReport
from lamella_trace._tables import as_json as as_json
from lamella_trace._tables import as_text as as_text
from lamella_trace._trace import Breakdown as Breakdown
from lamella_trace._trace import Kernel as Kernel
from lamella_trace._trace import KernelKind as KernelKind
from lamella_trace._trace import Trace as Trace
from lamella_trace._trace import TraceError as TraceError
from lamella_trace._trace import breakdown as breakdown
from lamella_trace._trace import classify as classify
from lamella_trace._trace import kernels_of as kernels_of
from lamella_trace._trace import operators_of as operators_of
from lamella_trace._trace import read_trace as read_trace
from lamella_trace._trace import streams_of as streams_of
from lamella_trace._verdict import losses as losses
from lamella_trace._verdict import verdict as verdict
