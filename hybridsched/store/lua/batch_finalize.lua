-- Take the duty to end a batch, and end it.
--
-- KEYS[1] batch:{id}  hash     KEYS[2] batch:{id}:chunks  hash     KEYS[3] batches-active  sorted set
-- ARGV[1] claim or end    ARGV[2] batch id
--   claim: ARGV[3] lease in ms
--   end:   ARGV[3] fence  ARGV[4] status  ARGV[5] lines done  ARGV[6] lines failed  ARGV[7] seconds to keep it
--          ARGV[8] lines of the failed that had not run
--
-- claim returns a fence, or 0: the batch has ended, work on it is left or still leased, or another has the duty.
-- end returns 1, or 0 when the fence is not the newest.
--@include clock
--@include chunk
local batch = redis.call('HMGET', KEYS[1], 'status', 'stop', 'at_end', 'outstanding', 'final_lease_ms', 'final_fence')
local status = batch[1]
if not status or status == 'completed' or status == 'failed' or status == 'expired' or status == 'cancelled' then
  return 0
end
local now = math.floor(clock_ms())
if ARGV[1] == 'claim' then
  if tonumber(batch[5]) > now then
    return 0
  end
  if batch[2] == '' then
    if batch[3] ~= '1' or tonumber(batch[4]) > 0 then
      return 0
    end
    redis.call('HSET', KEYS[1], 'status', 'finalizing')
  else
    for _, text in ipairs(redis.call('HVALS', KEYS[2])) do
      local chunk = chunk_of(text)
      if chunk and chunk.state == 'leased' and chunk.lease_ms > now then
        return 0
      end
    end
  end
  local fence = redis.call('HINCRBY', KEYS[1], 'fence', 1)
  redis.call('HSET', KEYS[1], 'final_fence', fence,
    'final_lease_ms', string.format('%d', now + tonumber(ARGV[3])))
  return fence
end
if batch[6] ~= ARGV[3] then
  return 0
end
redis.call('HSET', KEYS[1], 'status', ARGV[4], 'done', ARGV[5], 'failed', ARGV[6], 'cut', ARGV[8],
  'finished_ms', string.format('%d', now))
redis.call('EXPIRE', KEYS[1], ARGV[7])
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[2])
return 1
