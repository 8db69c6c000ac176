-- Register a batch.
--
-- KEYS[1] batch:{id}   hash       KEYS[2] batches  sorted set of ids by submit time
-- KEYS[3] batches-active  sorted set of the ids that have not ended     KEYS[4] batch:{id}:chunks  hash
-- ARGV[1] batch id     ARGV[2] deadline in ms from now, '' for none
-- ARGV[3..] field, value, field, value, ...
--
-- Nothing is written when a key is of another type: the error names it.
-- Returns 1, or 0 when the batch is known and has not ended (nothing is changed). An ended one begins anew.
--@include clock
--@include typed
local wrong = wrong_type(KEYS[1], 'hash') or wrong_type(KEYS[2], 'zset') or wrong_type(KEYS[3], 'zset')
if wrong then
  return wrong
end
local status = redis.call('HGET', KEYS[1], 'status')
if status and status ~= 'completed' and status ~= 'failed' and status ~= 'expired' and status ~= 'cancelled' then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[4])
local now = math.floor(clock_ms())
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
local deadline = ''
if ARGV[2] ~= '' then
  deadline = string.format('%d', now + tonumber(ARGV[2]))
end
redis.call('HSET', KEYS[1], 'submitted_ms', string.format('%d', now), 'deadline_ms', deadline)
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZADD', KEYS[3], now, ARGV[1])
return 1
