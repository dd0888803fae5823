"""Machine code as cuobjdump lists it: guards, moved constants, and which opcodes are floating point."""

from benchmarks import sass

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 FADD.FTZ R2, R3, R4 ;                /* 0x0 */
        /*0020*/              @UP1 UFMUL UR4, UR5, UR6 ;                /* 0x0 */
        /*0030*/                   HFMA2.MMA R7, -RZ, RZ, 0, 0 ;        /* 0x0 */
        /*0040*/                   HFMA2 R7, R8, R9, R10 ;              /* 0x0 */
        /*0050*/             @!UPT I2FP.F32.S32 R1, R2 ;                /* 0x0 */
        /*12340*/              @P6 IMMA.16832.S8.S8 R4, R8.ROW, R2.COL, R4 ; /* 0x0 */
"""
FLOAT = (
    "FADD FMUL FFMA FMNMX FSEL FSET FSETP FCHK FADD2 FMUL2 FFMA2 FMNMX3 HADD2 HMUL2 HFMA2 HMNMX2 HSET2 HSETP2 "
    "DADD DMUL DFMA DSETP MUFU I2F I2FP F2I F2IP F2F F2FP FRND UI2F UI2FP UF2I UFADD UFMUL UFFMA UFSETP "
    "HMMA QMMA OMMA DMMA HGMMA QGMMA UTCHMMA UTCQMMA UTCOMMA"
).split()
INTEGER = "IMAD IADD3 IDP IMMA IGMMA UTCIMMA LOP3 SHF PRMT VIMNMX ISETP LDG STG STS LDS BRA MOV SEL FLO".split()


def test_listings_are_read_with_their_guards(monkeypatch):
    said = {"--dump-sass": LISTING, "-res-usage": "REG:40 STACK:8"}
    monkeypatch.setattr(sass, "_cuobjdump", lambda option, path: said[option])
    machine = sass.machine(b"", "a kernel", 90, 0, 4)
    opcodes = ["LDC", "FADD", "UFMUL", "HFMA2", "HFMA2", "I2FP", "IMMA"]
    assert [i.opcode for i in machine.instructions] == opcodes and (machine.registers, machine.stack_bytes) == (40, 8)
    assert [text.split()[0] for text in machine.float_instructions] == ["FADD.FTZ", "UFMUL", "HFMA2", "I2FP.F32.S32"]


def test_float_opcodes_are_known_and_integer_ones_are_none():
    assert not set(FLOAT) - sass.FLOAT_OPCODES and not sass.FLOAT_OPCODES & set(INTEGER)
