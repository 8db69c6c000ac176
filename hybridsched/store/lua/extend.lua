-- Renew the leases of requests that the caller holds (a heartbeat). Others' requests are left alone.
--
-- KEYS 1-3 streams of the model, most urgent first
-- ARGV 1 consumer, then two for each request: class (0-2), entry id
-- Returns the entry ids that the caller no longer holds: it must stop working on them.
--@include entries

local lost, held = {}, {{}, {}, {}}
for i = 2, #ARGV, 2 do
  local class, entry = tonumber(ARGV[i]) + 1, ARGV[i + 1]
  if held_by(KEYS[class], entry, ARGV[1], 0) then
    held[class][#held[class] + 1] = entry
  else
    lost[#lost + 1] = entry
  end
end
for class = 1, 3 do
  for first = 1, #held[class], 1000 do
    local call = {'XCLAIM', KEYS[class], GROUP, ARGV[1], 0}
    for i = first, math.min(first + 999, #held[class]) do
      call[#call + 1] = held[class][i]
    end
    call[#call + 1] = 'JUSTID'
    redis.call(unpack(call))
  end
end
return lost
