-- Publish or renew the gates of several lanes, fenced by the leader's token and by each lane's epoch.
--
-- KEYS[1]        leader            string: the token of the policy worker that leads
-- KEYS[2i]       gate:{lane i}     string: JSON of the gate, with a lease (PX)
-- KEYS[2i+1]     gate-epoch:{lane i}  integer: raised whenever the lane's replica takes an online request
-- ARGV[1]        token of the caller; '' publishes without leading, and then only closes
-- ARGV[2]        channel for changes
-- ARGV[3]        lease in ms
-- ARGV[2i+2]     epoch that an opening was decided on; '' closes, and a close is never refused
-- ARGV[2i+3]     JSON of the gate without its last fields "epoch", "at_ms" and "since_ms" and the closing brace
--
-- Returns one integer for each lane: 1 changed and announced, 2 renewed as it stood,
-- 0 refused because the epoch has moved, -1 refused because the caller does not lead.
-- An epoch that is no number is written anew when the leader closes the lane: as the server's milliseconds, which
-- is above every earlier count, so that no opening decided before can pass.
-- A renewal keeps the stored text, so "at_ms" stays the time of the last change; "since_ms" is that of the state.
-- The fast path's own close (reason online_arrived) is renewed as it stands when the caller agrees: its time
-- tells later decisions which records are older than that arrival.
local lanes = (#KEYS - 1) / 2
local token = ARGV[1]
local leads = token ~= '' and redis.call('GET', KEYS[1]) == token
local now = redis.call('TIME')
local at_ms = string.format('%.3f', tonumber(now[1]) * 1000 + tonumber(now[2]) / 1000)
local arrived = '"reason":"online_arrived"'
local answer = {}
for i = 1, lanes do
  local gate, epoch_key = KEYS[2 * i], KEYS[2 * i + 1]
  local expected, body = ARGV[2 * i + 2], ARGV[2 * i + 3]
  local opening = expected ~= ''
  local epoch = redis.pcall('GET', epoch_key) or '0'
  if type(epoch) ~= 'string' or not string.match(epoch, '^%d+$') or #epoch > 18 or string.match(epoch, '^0.') then
    epoch = string.format('%.0f', math.floor(at_ms))
    if leads and not opening then
      redis.call('SET', epoch_key, epoch)
    end
  end
  if not leads and (token ~= '' or opening) then
    answer[i] = -1
  elseif opening and epoch ~= expected then
    answer[i] = 0
  else
    local stable = body .. ',"epoch":' .. epoch .. ',"at_ms":'
    local old = redis.pcall('GET', gate)
    if type(old) ~= 'string' then
      old = nil
    end
    local same = old and string.sub(old, 1, #stable) == stable
    if old and not same and not opening and string.find(body, arrived, 1, true) then
      same = string.find(old, arrived, 1, true)
    end
    if same then
      redis.call('PEXPIRE', gate, ARGV[3])
      answer[i] = 2
    else
      local state, since = '"state":"' .. (opening and 'open' or 'closed') .. '"', at_ms
      if old and string.find(old, state, 1, true) then
        since = string.match(old, '"since_ms":(%d+%.?%d*)') or at_ms
      end
      local text = stable .. at_ms .. ',"since_ms":' .. since .. '}'
      redis.call('SET', gate, text, 'PX', ARGV[3])
      redis.call('PUBLISH', ARGV[2], text)
      answer[i] = 1
    end
  end
end
return answer
