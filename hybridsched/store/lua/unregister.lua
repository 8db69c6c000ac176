-- A replica leaves: no more wakes for it. Its consumer is forgotten where it holds nothing.
--
-- KEYS 1-3 streams of the model, most urgent first   4 its replicas hash
-- ARGV 1 prefix   2 replica   3 consumer
-- Returns how many requests its consumer still holds (they are reclaimed when their lease is over).
--@include clock
--@include entries
--@include replicas

redis.pcall('HDEL', KEYS[4], ARGV[2])  -- of another type: it holds no record
local holds, left = 0, 0
for class = 1, 3 do
  local stream = KEYS[class]
  local held = redis.pcall('XPENDING', stream, GROUP, '-', '+', 1000, ARGV[3])
  if not held.err then
    holds = holds + #held
    if #held == 0 then
      redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, ARGV[3])
    end
    left = left + unclaimed(stream)
  end
end
if left > 0 then
  wake(KEYS[4], ARGV[1], least_loaded(KEYS[4], clock_ms(), nil))
end
return holds
