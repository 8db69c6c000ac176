-- Change the status of a batch, if its present one allows it.
--
-- KEYS[1] batch:{id}  hash     KEYS[2] batches-active  sorted set     KEYS[3] batch:{id}:chunks  hash
-- ARGV[1] batch id   ARGV[2] new status   ARGV[3] stop ('' leaves it)   ARGV[4] message ('' leaves it)
-- ARGV[5] seconds to keep an ended batch, 0 when the new status is no end   ARGV[6..] statuses it may have now
--
-- Returns {1, new status} or {0, present status}; {0, ''} when the batch is unknown.
--@include clock
local status = redis.call('HGET', KEYS[1], 'status')
if not status then
  return {0, ''}
end
local allowed = false
for i = 6, #ARGV do
  allowed = allowed or ARGV[i] == status
end
if not allowed then
  return {0, status}
end
redis.call('HSET', KEYS[1], 'status', ARGV[2])
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'stop', ARGV[3])
end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 'message', ARGV[4])
end
if ARGV[5] ~= '0' then
  redis.call('HSET', KEYS[1], 'finished_ms', string.format('%d', math.floor(clock_ms())))
  redis.call('EXPIRE', KEYS[1], ARGV[5])
  redis.call('EXPIRE', KEYS[3], ARGV[5])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
return {1, ARGV[2]}
