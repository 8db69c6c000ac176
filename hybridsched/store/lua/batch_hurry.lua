-- Move a batch's newest job in its RQ queue before those of batches that are in no hurry.
--
-- KEYS[1] rq:queue:NAME  list of job ids, BATCH-cNUMBER-SUFFIX
-- ARGV[1] the job's id    ARGV[2..] batches whose jobs stay before it
--
-- Returns 1, or 0 when it stays: a worker has it already, or no other batch's job stands before it.
local stay = {}
for i = 2, #ARGV do
  stay[ARGV[i]] = true
end
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if id == ARGV[1] then
    return 0
  end
  if not stay[string.match(id, '^(.+)%-c%d+%-%x+$') or ''] then
    if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then
      return 0
    end
    redis.call('LINSERT', KEYS[1], 'BEFORE', id, ARGV[1])
    return 1
  end
end
return 0
