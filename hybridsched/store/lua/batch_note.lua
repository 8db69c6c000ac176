-- Note why a batch waits, for whoever asks. It changes nothing else; a finished chunk takes it away.
--
-- KEYS[1] batch:{id}  hash
-- ARGV[1] code   ARGV[2] message
--
-- Returns 1, or 0 when there is no such batch or it has ended.
--@include clock
local batch = redis.call('HMGET', KEYS[1], 'status', 'wait_code')
local status = batch[1]
if not status or status == 'completed' or status == 'failed' or status == 'expired' or status == 'cancelled' then
  return 0
end
local now = string.format('%d', math.floor(clock_ms()))
if batch[2] ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'wait_ms', now)
end
redis.call('HSET', KEYS[1], 'wait_code', ARGV[1], 'wait_message', ARGV[2], 'wait_seen_ms', now)
return 1
