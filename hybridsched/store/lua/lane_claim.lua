-- Take the first of some lanes that no other has.
--
-- KEYS[1]   lane-holder-fence  integer: raised by every claim of a lane
-- KEYS[2..] lane-holder:{lane} of each candidate
-- ARGV[1]   owner: a name unique to the process      ARGV[2]  Slurm job of the owner      ARGV[3]  its node
-- ARGV[4]   lease in ms     ARGV[5..]  the candidates' names
--
-- Returns {index, token}: the candidate that was taken, counted from 0, and what stands in its key; {-1, ''} when
-- none is free. What stands in a key and is no holder of ours comes free after a lease, whatever its own life. The token carries the fence, so an earlier holder's token never becomes valid again.
--@include clock

-- Whether a holder stands there that will run out by itself.
local function held(key)
  local raw = redis.pcall('GET', key)
  if type(raw) ~= 'string' or redis.call('PTTL', key) < 0 then
    return false
  end
  local read, holder = pcall(cjson.decode, raw)
  return read and type(holder) == 'table' and type(holder.owner) == 'string' and type(holder.fence) == 'number'
end

for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    local token = cjson.encode({
      lane = ARGV[i + 3], owner = ARGV[1], job = ARGV[2], node = ARGV[3],
      fence = redis.call('INCR', KEYS[1]), since_ms = math.floor(clock_ms()),
    })
    redis.call('SET', KEYS[i], token, 'PX', ARGV[4])
    return {i - 2, token}
  end
  if not held(KEYS[i]) then
    local left = redis.call('PTTL', KEYS[i])
    if left < 0 or left > tonumber(ARGV[4]) then
      redis.call('PEXPIRE', KEYS[i], ARGV[4])
    end
  end
end
return {-1, ''}
