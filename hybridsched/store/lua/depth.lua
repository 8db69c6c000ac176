-- How much of a model waits unclaimed, and how much is claimed and not yet ended.
--
-- KEYS 1-3 streams of the model, most urgent first
-- ARGV none
-- Returns {now_ms, oldest wait in ms (-1: nothing waits), then for each class: waiting, claimed}.
--@include clock
--@include entries

local now = clock_ms()
local reply, oldest = {string.format('%.3f', now), '-1'}, -1
for class = 1, 3 do
  local waiting = unclaimed(KEYS[class])
  reply[#reply + 1] = waiting
  reply[#reply + 1] = (length_of(KEYS[class]) or 0) - waiting
  local first = waiting > 0 and (head(KEYS[class]) or redis.call('XRANGE', KEYS[class], '-', '+', 'COUNT', 1)[1])
  if first then
    oldest = math.max(oldest, now - (tonumber(field(first[2], 'accepted_ms') or '') or now))
  end
end
reply[2] = string.format('%.3f', oldest)
return reply
