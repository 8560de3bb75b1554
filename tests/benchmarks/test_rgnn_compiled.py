"""`benchmarks/rgnn_compiled.py` parses the output of `ptxas` and `nvdisasm`."""

from benchmarks import rgnn_compiled

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rgcn_2_traverse' for 'sm_90a'
ptxas info    : Function properties for rgcn_2_traverse
    0 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers
"""
# A loop inside a loop, and the branch to itself that ends every kernel.
DISASSEMBLED = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IMAD R2, R2, R3, R4 ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 FFMA R4, R4, R5, R6 ;
        /*0040*/              @P1  BRA `(.L_x_0) ;
        /*0050*/                   STG.E desc[UR4][R2.64], R4 ;
        /*0060*/              @P2  BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_2);
"""


def test_registers_and_spills(tmp_path):
    (tmp_path / "a.log").write_text(LOG)
    assert rgnn_compiled.registers(tmp_path) == {"rgcn_2_traverse": (64, 24, tmp_path / "a.cubin")}


def test_instructions_of_innermost_loops():
    total, loops = rgnn_compiled.instructions(DISASSEMBLED)
    assert total == 9
    assert [dict(loop) for loop in loops] == [{"LDG": 1, "FFMA": 1, "BRA": 1}]
