-- Register a batch.
--
-- KEYS[1] batch:{id}   hash       KEYS[2] batches  sorted set of ids by submit time
-- KEYS[3] batches-active  sorted set of the ids that have not ended
-- ARGV[1] batch id     ARGV[2] deadline in ms from now, '' for none
-- ARGV[3..] field, value, field, value, ...
--
-- Returns 1, or 0 when the id is known already (nothing is changed).
--@include clock
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
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
