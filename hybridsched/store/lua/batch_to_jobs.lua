-- Say of a batch whether only Slurm jobs of its user run it.
--
-- KEYS[1] batch:{id}  hash
-- ARGV[1] 1 or 0
--
-- Returns 1, or 0 when there is no such batch.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[1], 'jobs_only', ARGV[1])
return 1
