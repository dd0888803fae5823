# 120 s. Bits of the sm80 kernels for intflash_bfp and intflash_bfp8 (cases shared out over 16 processes), bits of the
# other kernels that were touched, then times. Bits may share the GPU; times (about 15 s, at the end) need it alone.
nvidia-smi --query-gpu=name --format=csv > $R/card.txt
J=bfpcuda_job
P=""
for i in 0 1 2 3 4 5 6 7; do for m in intflash_bfp intflash_bfp8; do
  timeout 75 python -W ignore $J/bits.py sm80 $m $i 8 60 > $R/bits_sm80_${m}_$i.jsonl 2> $R/bits_sm80_${m}_$i.err & P="$P $!"
done; done
wait $P
P=""
timeout 40 python $J/times.py warm > $R/warm.log 2>&1 & P="$P $!"
for i in 0 1 2 3 4 5; do timeout 28 python -W ignore $J/bits.py long_rows intflash_bfp $i 40 20 > $R/bits_long_rows_$i.jsonl 2>&1 & P="$P $!"; done
for m in intflash intflash_p8 intflash_online; do for i in 0 1; do
  timeout 28 python -W ignore $J/bits.py sm80 $m $i 12 20 > $R/bits_sm80_${m}_$i.jsonl 2>&1 & P="$P $!"; done; done
timeout 28 python -m intflash.cli selfcheck --backend cuda --method intflash_bfp --seconds 18 --out $R/selfcheck > $R/selfcheck.log 2>&1 & P="$P $!"
wait $P
timeout 30 python $J/times.py time > $R/times.log 2>&1
cat $R/bits_*.jsonl | python -c "
import sys, json
rows = [json.loads(x) for x in sys.stdin if x.startswith('[')]
bad = [x for x in rows if x[3] and x[3] != 'not run']
print(len(rows), 'cases', sum(x[3] == 'not run' for x in rows), 'not run', len(bad), 'wrong')
for x in bad: print(x)
" > $R/summary.txt
head -c 6000 $R/summary.txt; cat $R/times_time.csv
